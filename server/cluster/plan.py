"""What a user may choose for a cluster, and which choices are rejected.

Knows: the options of `quill cluster`, and those of `quill serve` that replicas have. Does not know:
Ray, what the choices do.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quill.server.addresses import is_loopback, write_address
from quill.server.cluster.coordinator import NUM_SLOTS
from quill.server.errors import StartError
from quill.server.settings import CLUSTER_OPTIONS, Settings, as_plain, from_plain, read_settings

MAX_NUM_SEQS = 256  # of a replica, as in `quill serve`
TARGET = 0.7  # of the sequences: with more requests than that, another replica is started
METRICS_PORT = 9464
DRAIN_S = 2.0  # after which every HAProxy has drained a replica that stops
RAY_PORTS = range(10002, 20000)  # of Ray's workers
REPLICA_PORTS = range(31001, 32001)  # below those that Linux gives to clients


@dataclass(frozen=True, kw_only=True)
class ReplicaArgs:
    """`args` in serve.yaml."""

    bundle: str  # a directory on every machine, or a URL that fsspec can read
    manifest_sha256: str | None = None  # of manifest.json; null: of any bundle
    host: str  # where HAProxy listens, on every machine with replicas
    port: int
    one_machine: bool = False  # true: replicas listen at the loopback address only
    longest_answer_s: float = 600.0  # a replica that stops finishes its calls for so long
    settings: Settings  # the options of `quill serve`

    @property
    def frontend(self) -> str:
        return write_address(self.host, self.port)

    def plain(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return own | {"settings": as_plain(self.settings, CLUSTER_OPTIONS)}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ReplicaArgs":
        """Reads what `plain` wrote."""
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise StartError(f"unknown args: {', '.join(unknown)}; known are: {sorted(known)}")
        missing = sorted({"bundle", "host", "port"} - set(values))
        if missing:
            raise StartError(f"args needs {', '.join(missing)}")
        settings = from_plain(values.get("settings", {}), CLUSTER_OPTIONS)
        args = cls(**{**values, "settings": settings})
        metrics_host = "127.0.0.1" if args.one_machine else "0.0.0.0"
        return replace(args, settings=replace(settings, host=metrics_host, http_port="off"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    args: ReplicaArgs
    min_replicas: int
    max_replicas: int
    target_requests: int  # running and waiting, of each replica
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0

    def __post_init__(self) -> None:
        port = self.args.port
        if port == 0:
            raise StartError("--port is 0; a cluster needs a fixed port: give one from 1 up")
        for taken, whose in ((RAY_PORTS, "Ray's workers"), (REPLICA_PORTS, "replicas")):
            if port in taken:
                raise StartError(
                    f"--port is {port}; {taken[0]} to {taken[-1]} are for {whose}: give another"
                )
        if self.max_replicas > NUM_SLOTS // 2:
            raise StartError(f"--replicas is more than {NUM_SLOTS // 2}")

    @property
    def cpus(self) -> int:
        """Of each replica."""
        return self.args.settings.threads or 1

    @property
    def shutdown_s(self) -> float:
        """After which Ray kills a replica that stops."""
        return 2 * DRAIN_S + self.args.longest_answer_s


def read_plan(
    args: argparse.Namespace, *, threads: int, kv_cache_mb: int | None = None, one_machine: bool
) -> Plan:
    """`threads`, `kv_cache_mb`: of each replica, where the user chose none."""
    given = read_settings(args)
    settings = replace(
        given,
        threads=given.threads or threads,
        kv_cache_mb=given.kv_cache_mb or kv_cache_mb,
        metrics_port=METRICS_PORT if given.metrics_port == "auto" else given.metrics_port,
        api_keys=None if given.api_keys is None else given.api_keys.absolute(),
    )
    replica_args = ReplicaArgs(
        bundle=_bundle(args.bundle),
        manifest_sha256=args.sha256,
        host=given.host,
        port=given.port,
        one_machine=one_machine,
        longest_answer_s=args.drain_timeout,
        settings=settings,
    )
    return Plan(
        args=replica_args,
        min_replicas=args.replicas[0],
        max_replicas=args.replicas[1],
        target_requests=args.target_requests
        or round(TARGET * (given.max_num_seqs or MAX_NUM_SEQS)),
    )


def _bundle(given: str) -> str:
    """Replicas run in Ray's directories: a path must be absolute."""
    return given if "://" in given else str(Path(given).expanduser().absolute())


def check_exposure(plan: Plan, insecure: bool) -> None:
    """HAProxy has no TLS here: a cluster that others can reach needs something that encrypts."""
    host = plan.args.host
    if not is_loopback(host) and not insecure:
        raise StartError(
            f"--host {host} can be reached from other machines, and a cluster doesn't encrypt. Put "
            "something that terminates TLS in front of it, and give --insecure"
        )
