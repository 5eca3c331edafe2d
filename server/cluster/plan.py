"""What a person may choose for a cluster, and which choices are refused.

Knows: the command line's names. Does not know: Ray, what the choices do.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from quill.server.addresses import is_loopback
from quill.server.cluster.environment import REPLICA_PORTS
from quill.server.cluster.replica.options import ReplicaOptions
from quill.server.errors import StartError

ROWS = 256  # of a replica, as `quill serve` has it
BUSY = 0.7  # of the rows: beyond it another replica is wanted
METRICS_PORT = 9464
DRAIN_S = 30.0  # how long a replica that ends is still found by those who look for one
RAY_PORTS = range(10002, 20000)  # of Ray's own workers


@dataclass(frozen=True, kw_only=True)
class Plan:
    options: ReplicaOptions
    least: int  # replicas
    most: int
    host: str
    port: int
    cpus: int  # of each replica
    target_requests: int  # running and waiting, of each replica
    longest_answer_s: float
    http_port: int = 8000  # Ray's own; nothing of Quill's is there
    drain_s: float = DRAIN_S
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0

    def __post_init__(self) -> None:
        if self.port == 0:
            raise StartError("--port is 0; HAProxy wants to know its port: give a number from 1 up")
        if self.port in RAY_PORTS:
            raise StartError(
                f"--port is {self.port}; from {RAY_PORTS[0]} to {RAY_PORTS[-1]} they are for Ray's "
                "own workers. Give another"
            )
        first, last = REPLICA_PORTS
        if first <= self.port <= last:
            raise StartError(
                f"--port is {self.port}; from {first} to {last} they are for the replicas. "
                "Give another"
            )

    @property
    def max_requests(self) -> int:
        """Of a replica: what runs and what may wait."""
        return (self.options.max_num_seqs or ROWS) + self.options.queue

    @property
    def shutdown_s(self) -> float:
        """What a replica that ends is given."""
        return self.drain_s + self.longest_answer_s


def read_plan(
    args: argparse.Namespace, *, threads: int, cache_mb: int | None = None, one_machine: bool
) -> Plan:
    """`threads` and `cache_mb`: of each replica, if they weren't chosen."""
    least, most = args.replicas
    options = ReplicaOptions(
        bundle=_bundle(args.bundle),
        manifest_sha256=args.sha256,
        precision=args.precision,
        max_num_seqs=args.max_num_seqs,
        context=args.context,
        cache_mb=args.kv_cache_mb or cache_mb,
        threads=args.threads or threads,
        spinning=args.spinning,
        queue=args.max_queue,
        prefix_cache=args.prefix_cache,
        speculative=args.speculative,
        api_keys=None if args.api_keys is None else str(args.api_keys.absolute()),
        open_reflection="reflection" in args.allow_unauthenticated,
        open_metrics="metrics" in args.allow_unauthenticated,
        share_prefix_cache=args.share_prefix_cache,
        metrics_host="127.0.0.1" if one_machine else "0.0.0.0",
        metrics_port=_metrics_port(args.metrics_port),
        one_machine=one_machine,
        tracing=args.tracing,
        log_format=args.log_format,
    )
    return Plan(
        options=options,
        least=least,
        most=most,
        host=args.host,
        port=args.port,
        cpus=options.threads or 1,
        target_requests=args.target_requests or round(BUSY * (args.max_num_seqs or ROWS)),
        longest_answer_s=args.drain_timeout,
    )


def _bundle(given: str) -> str:
    """Replicas run in directories of Ray's own: a path must be whole."""
    return given if "://" in given else str(Path(given).expanduser().absolute())


def _metrics_port(given: str | int) -> int | None:
    if given == "off":
        return None
    return METRICS_PORT if given == "auto" else int(given)


def check_exposure(plan: Plan, insecure: bool) -> None:
    """Ray has no TLS for gRPC: whoever can be reached from outside must say who sees to it."""
    if is_loopback(plan.host) or insecure:
        return
    raise StartError(
        f"--host {plan.host} can be reached from other machines, and a cluster speaks in the "
        "clear. Put something that ends TLS in front of it, and say --insecure"
    )
