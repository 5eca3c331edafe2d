"""What a replica is started with: what stands under `args` in serve.yaml.

Knows: names, kinds. Does not know: Ray, what the choices do.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quill.server.errors import StartError
from quill.server.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """None: the replica chooses, as `quill serve` does."""

    bundle: str  # a directory, or a URL of one
    manifest_sha256: str | None = None
    precision: str | None = None
    max_num_seqs: int | None = None
    context: int | None = None
    cache_mb: int | None = None
    threads: int | None = None
    spinning: bool = True
    queue: int = 256
    prefix_cache: bool = True
    speculative: bool = True
    api_keys: str | None = None  # a file that every machine has
    open_reflection: bool = False
    open_metrics: bool = False
    share_prefix_cache: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # replicas of a machine take the first free one from it on
    one_machine: bool = False  # all replicas are on the machine that clients call
    tracing: bool = False
    log_format: str = "json"

    def settings(self) -> Settings:
        """The host is that of the metrics; where calls are taken, Ray says."""
        return Settings(
            host=self.metrics_host,
            metrics_port="off" if self.metrics_port is None else self.metrics_port,
            http_port="off",
            precision=self.precision,
            max_num_seqs=self.max_num_seqs,
            context=self.context,
            kv_cache_mb=self.cache_mb,
            threads=self.threads,
            spinning=self.spinning,
            max_queue=self.queue,
            prefix_cache=self.prefix_cache,
            speculative=self.speculative,
            api_keys=None if self.api_keys is None else Path(self.api_keys),
            allow_unauthenticated=tuple(
                name for name in ("reflection", "metrics") if getattr(self, f"open_{name}")
            ),
            share_prefix_cache=self.share_prefix_cache,
            tracing=self.tracing,
            log_format=self.log_format,
        )


def read_options(args: dict[str, Any]) -> ReplicaOptions:
    """As serve.yaml has them."""
    known = {each.name for each in fields(ReplicaOptions)}
    unknown = sorted(set(args) - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise StartError(f"args has {', '.join(unknown)}; it may have {names}")
    if not isinstance(args.get("bundle"), str):
        raise StartError("args needs a bundle: a directory that every machine has, or a URL")
    return ReplicaOptions(**args)


def write_options(options: ReplicaOptions) -> dict[str, Any]:
    """All of them: a file that says everything can be read without a manual."""
    return asdict(options)
