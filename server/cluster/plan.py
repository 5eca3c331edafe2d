"""What a user chooses for a cluster: checked, and written as serve.yaml or a RayService.

Knows: the options of `quill cluster`, those of `quill serve` that replicas have, Ray Serve's and
KubeRay's names. Does not know: Ray itself; no Ray is needed to write files.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from quill.server.addresses import is_loopback, write_address
from quill.server.cluster.coordinator import NUM_SLOTS
from quill.server.errors import StartError
from quill.server.settings import (
    CLUSTER_OPTIONS,
    OPTIONS,
    Settings,
    as_plain,
    from_plain,
    read_settings,
)

MAX_NUM_SEQS = 256  # of a replica, as in `quill serve`
TARGET = 0.7  # of the sequences: with more requests than that, another replica is started
METRICS_PORT = 9464
DRAIN_S = 2.0  # after which every HAProxy has drained a replica that stops
RAY_PORTS = range(10002, 20000)  # of Ray's workers
REPLICA_PORTS = range(31001, 32001)  # below those that Linux gives to clients
RAY = "2.60.0"
APPLICATION, REPLICA = "quill", "replica"
NAMESPACE, COORDINATOR = "quill", "coordinator"  # of an actor
REQUESTS = "requests"  # the metric by which replicas scale
HTTP_PORT = 8000  # Ray Serve's own health, which KubeRay checks; Quill has no HTTP here
WORKER_MEMORY = "4Gi"
# Of every process of Ray.
ENVIRONMENT = {
    # The replica's gRPC server shares an event loop with Ray's: grpc.aio supports no second one.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_worker_niceness": "0",  # Ray would run replicas at niceness 15
    "RAY_AUTH_MODE": "token",  # nobody joins the cluster without a token
    "RAY_USAGE_STATS_ENABLED": "0",
}
Json = dict[str, Any]

_SERVE_HEAD = """\
Quill on Ray {ray}. Deploy it with `serve deploy serve.yaml`, on a Ray cluster whose every machine
has quill[cluster], and was started by `ray start` with this environment. ~/.ray/auth_token is the
same on every machine; `ray get-auth-token --generate` makes it:

{environment}

A cluster doesn't encrypt: terminate TLS in front of it. A change of num_replicas only scales; a
change of args replaces replicas, each after its successor is ready and its last call has ended.

- args.bundle: a directory on every machine, or a URL that fsspec can read
- args.manifest_sha256: of the bundle's manifest.json; null: any bundle
- args.host, port: where clients call, on every machine with replicas
- args.one_machine: replicas listen at the loopback address only
- args.longest_answer_s: a replica that stops finishes its calls for so long
{options}
"""
_RAY_SERVICE_HEAD = """\
Quill on Kubernetes with KubeRay 1.5.1 or newer; its authors never ran it. Clients call the service.
A bundle that is a path must be on every pod, in the image or on a volume.{keys}
"""


@dataclass(frozen=True, kw_only=True)
class ReplicaArgs:
    """`args` in serve.yaml, whose head (_SERVE_HEAD) says what each is."""

    bundle: str
    manifest_sha256: str | None = None
    host: str
    port: int
    one_machine: bool = False
    longest_answer_s: float = 600.0
    settings: Settings

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
    # Replicas run in Ray's directories: a path must be absolute.
    is_url = "://" in args.bundle
    replica_args = ReplicaArgs(
        bundle=args.bundle if is_url else str(Path(args.bundle).expanduser().absolute()),
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


def check_exposure(plan: Plan, insecure: bool) -> None:
    """HAProxy has no TLS here: a cluster that others can reach needs something that encrypts."""
    host = plan.args.host
    if is_loopback(host) or insecure:
        return
    keys = "" if plan.args.settings.api_keys else ", and without --api-keys anybody may call"
    raise StartError(
        f"--host {host} can be reached from other machines, and a cluster doesn't encrypt{keys}. "
        "Put something that terminates TLS in front of it, and give --insecure"
    )


def serve_config(plan: Plan) -> Json:
    application = {
        "name": APPLICATION,
        "route_prefix": None,
        "import_path": "quill.server.cluster.deployment:build",
        "args": plan.args.plain(),
        "deployments": [replica_options(plan)],
    }
    return {
        "proxy_location": "Disabled" if plan.args.one_machine else "EveryNode",
        "http_options": {"host": plan.args.host, "port": HTTP_PORT},
        "applications": [application],
    }


def replica_options(plan: Plan) -> Json:
    """Of the replicas, as a deployment of Ray Serve has them."""
    count: Json = {"num_replicas": plan.min_replicas}
    if plan.min_replicas != plan.max_replicas:
        scaling = {
            "min_replicas": plan.min_replicas,
            "max_replicas": plan.max_replicas,
            "policy": {"policy_function": "quill.server.cluster.plan:wanted_replicas"},
            "target_ongoing_requests": plan.target_requests,
            "upscale_delay_s": plan.upscale_delay_s,
            "downscale_delay_s": plan.downscale_delay_s,
            "look_back_period_s": 15,
        }
        count = {"autoscaling_config": scaling}
    return {
        "name": REPLICA,
        **count,
        "ray_actor_options": {"num_cpus": plan.cpus},
        "max_surge_percent": 25,
        "graceful_shutdown_timeout_s": plan.shutdown_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
    }


def wanted_replicas(context: Any) -> tuple[int, Json]:
    """Ray Serve's autoscaling policy, by running and waiting requests."""
    num_requests = sum(context.aggregated_metrics.get(REQUESTS, {}).values())
    return max(1, math.ceil(num_requests / context.config.target_ongoing_requests)), {}


def write_serve_config(plan: Plan) -> str:
    exports = "\n".join(f"  export {name}={value}" for name, value in ENVIRONMENT.items())
    options = "\n".join(f"- args.settings.{name}: {OPTIONS[name].help}" for name in CLUSTER_OPTIONS)
    head = _SERVE_HEAD.format(ray=RAY, environment=exports, options=options)
    return _write(head, serve_config(plan))


def write_ray_service(plan: Plan, image: str) -> str:
    """`image`: one with quill[cluster]."""
    keys = plan.args.settings.api_keys
    mount = "" if keys is None else f" Mount a secret with the\nAPI keys at {keys}."
    return _write(_RAY_SERVICE_HEAD.format(keys=mount), *ray_service(plan, image))


def ray_service(plan: Plan, image: str) -> tuple[Json, Json]:
    """The RayService, and the Service of its replicas' HAProxies."""
    port = plan.args.port
    head_ports = [("gcs-server", 6379), ("dashboard", 8265)]
    head = _pod(image, "ray-head", head_ports, "1", "2Gi", _RAYLET)
    head["automountServiceAccountToken"] = True  # the autoscaler asks Kubernetes for pods
    ready = ["quill", "health", "--address", f"localhost:{port}"]
    worker = _pod(image, "ray-worker", [("grpc", port)], str(plan.cpus), WORKER_MEMORY, ready)
    worker["terminationGracePeriodSeconds"] = round(plan.shutdown_s) + 30
    workers = {
        "groupName": "replicas",
        "replicas": plan.min_replicas,
        "minReplicas": plan.min_replicas,
        "maxReplicas": plan.max_replicas,
        "rayStartParams": {},
        "template": {"spec": worker},
    }
    start = {"num-cpus": "0", "dashboard-host": "0.0.0.0"}  # no replica; KubeRay's connections
    cluster = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "headGroupSpec": {"rayStartParams": start, "template": {"spec": head}},
        "workerGroupSpecs": [workers],
    }
    config = yaml.safe_dump(serve_config(plan), sort_keys=False)
    ports = [{"name": "grpc", "port": port, "targetPort": "grpc"}]
    service = {"selector": {"ray.io/group": "replicas"}, "ports": ports}
    names = {"metadata": {"name": APPLICATION}}
    return (
        {"apiVersion": "ray.io/v1", "kind": "RayService", **names,
         "spec": {"serveConfigV2": config, "rayClusterConfig": cluster}},
        {"apiVersion": "v1", "kind": "Service", **names, "spec": service},
    )  # fmt: skip


# Ray's agent, as KubeRay's own probes ask it; the image has no wget.
_RAYLET = [
    *("python", "-c"),
    "import urllib.request as r; r.urlopen('http://localhost:52365/api/local_raylet_healthz')",
]


def _pod(
    image: str, name: str, ports: list[tuple[str, int]], cpu: str, memory: str, ready: list[str]
) -> Json:
    """`ready`: the command of its readiness probe."""
    # KubeRay sets the token and its mode.
    given = {name: value for name, value in ENVIRONMENT.items() if "AUTH" not in name}
    container = {
        "name": name,
        "image": image,
        "env": [{"name": name, "value": value} for name, value in given.items()],
        "ports": [{"name": name, "containerPort": port} for name, port in ports],
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}},
        "readinessProbe": _probe(ready, period_s=10, num_failures=2),
        "livenessProbe": _probe(_RAYLET, period_s=30, num_failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    user = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    return {"securityContext": {**user, **profile}, "containers": [container]}


def _probe(command: list[str], *, period_s: int, num_failures: int) -> Json:
    return {
        "exec": {"command": command},
        "initialDelaySeconds": 10,
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": num_failures,
    }


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def represent_str(self, text: str) -> Any:
        """Several lines as a block."""
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _write(head: str, *documents: Json) -> str:
    comment = "\n".join(f"# {line}".rstrip() for line in head.splitlines())
    body = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True)
    return f"{comment}\n{body}"
