"""serve.yaml and a RayService: a plan as Ray Serve and KubeRay read it.

Knows: Ray Serve's and KubeRay's names. Does not know: Ray itself; no Ray is needed to write files.
The RayService was never run by its authors.
"""

import math
from typing import Any

import yaml

from quill.server.cluster.plan import Plan
from quill.server.settings import CLUSTER_OPTIONS, OPTIONS

RAY = "2.60.0"
APPLICATION = "quill"
REPLICA = "replica"
NAMESPACE, COORDINATOR = "quill", "coordinator"  # of an actor
REQUESTS = "requests"  # the name under which replicas report their load
WORKER_MEMORY = "4Gi"
HTTP_PORT = 8000  # Ray Serve's own health, which KubeRay checks; Quill has no HTTP here
# Of every process of Ray.
ENVIRONMENT = {
    # The replica's gRPC server shares an event loop with Ray's: grpc.aio supports no second one.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_worker_niceness": "0",  # Ray would run replicas at niceness 15
    "RAY_AUTH_MODE": "token",  # nobody joins the cluster without a token
    "RAY_USAGE_STATS_ENABLED": "0",
}
Json = dict[str, Any]

_HEAD = """\
Quill on Ray {ray}. Deploy it with `serve deploy serve.yaml`, on a Ray cluster whose every machine
has quill[cluster], and was started by `ray start` with this environment. ~/.ray/auth_token is the
same on every machine; `ray get-auth-token --generate` makes it:

{environment}

A cluster doesn't encrypt: terminate TLS in front of it. A deployed change of num_replicas only
scales; a change of args replaces replicas, a few at a time.

- proxy_location, http_options: Ray Serve's own health; clients call args.port
- max_surge_percent: new replicas are ready before old ones stop
- autoscaling_config: by running and waiting requests instead of processor time
- graceful_shutdown_timeout_s: longer than longest_answer_s
- args.bundle: a directory on every machine, or a URL that fsspec can read
- args.manifest_sha256: of the bundle's manifest.json; null: any bundle
- args.host, port: where HAProxy listens, on every machine with replicas
- args.one_machine: replicas listen at the loopback address only
- args.longest_answer_s: a replica that stops finishes its calls for so long
{options}
"""


def serve_config(plan: Plan) -> Json:
    args = plan.args
    return {
        "proxy_location": "Disabled" if args.one_machine else "EveryNode",
        "http_options": {"host": args.host, "port": HTTP_PORT},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": None,
                "import_path": "quill.server.cluster.deployment:build",
                "args": args.plain(),
                "deployments": [replica_options(plan)],
            }
        ],
    }


def replica_options(plan: Plan) -> Json:
    """The replicas' options, as Ray Serve's deployments have them."""
    return {
        "name": REPLICA,
        **_count(plan),
        "ray_actor_options": {"num_cpus": plan.cpus},
        "max_surge_percent": 25,
        "graceful_shutdown_timeout_s": plan.shutdown_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
    }


def _count(plan: Plan) -> Json:
    if plan.min_replicas == plan.max_replicas:
        return {"num_replicas": plan.min_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": plan.min_replicas,
            "max_replicas": plan.max_replicas,
            "policy": {"policy_function": "quill.server.cluster.config:wanted_replicas"},
            "target_ongoing_requests": plan.target_requests,
            "upscale_delay_s": plan.upscale_delay_s,
            "downscale_delay_s": plan.downscale_delay_s,
            "look_back_period_s": 15,
        }
    }


def wanted_replicas(context: Any) -> tuple[int, Json]:
    """Ray Serve's autoscaling policy: each replica has its target of requests."""
    num_requests = sum(context.aggregated_metrics.get(REQUESTS, {}).values())
    return max(1, math.ceil(num_requests / context.config.target_ongoing_requests)), {}


def write_serve_config(plan: Plan) -> str:
    exports = "\n".join(f"  export {name}={value}" for name, value in ENVIRONMENT.items())
    options = "\n".join(f"- args.settings.{name}: {OPTIONS[name].help}" for name in CLUSTER_OPTIONS)
    head = _HEAD.format(ray=RAY, environment=exports, options=options)
    comment = "\n".join(f"# {line}".rstrip() for line in head.splitlines())
    return f"{comment}\n{_dump(serve_config(plan))}"


def ray_service(plan: Plan, image: str) -> list[Json]:
    """For KubeRay 1.5.1 or newer. `image`: one with quill[cluster]."""
    # The operator sets the token and its mode.
    environment = [
        {"name": name, "value": value} for name, value in ENVIRONMENT.items() if "AUTH" not in name
    ]
    ports = [{"name": "gcs-server", "containerPort": 6379}]
    ports += [{"name": "dashboard", "containerPort": 8265}]
    head = _container("ray-head", image, environment, ports, "1", "2Gi")
    ports = [{"name": "grpc", "containerPort": plan.args.port}]
    worker = _container("ray-worker", image, environment, ports, str(plan.cpus), WORKER_MEMORY)
    cluster = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            # The autoscaler beside the head asks Kubernetes for pods.
            "template": {"spec": {"automountServiceAccountToken": True, "containers": [head]}},
        },
        "workerGroupSpecs": [
            {
                "groupName": "replicas",
                "replicas": plan.min_replicas,
                "minReplicas": plan.min_replicas,
                "maxReplicas": plan.max_replicas,
                "rayStartParams": {},
                "template": {
                    "spec": {
                        "terminationGracePeriodSeconds": round(plan.shutdown_s) + 30,
                        "containers": [worker],
                    }
                },
            }
        ],
    }
    spec = {"serveConfigV2": _dump(serve_config(plan)), "rayClusterConfig": cluster}
    service = {
        "selector": {"ray.io/group": "replicas"},
        "ports": [{"name": "grpc", "port": plan.args.port, "targetPort": "grpc"}],
    }
    return [
        {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": APPLICATION},
         "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": APPLICATION},
         "spec": service},
    ]  # fmt: skip


def _container(
    name: str, image: str, environment: list[Json], ports: list[Json], cpu: str, memory: str
) -> Json:
    resources = {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}
    return {
        "name": name,
        "image": image,
        "env": environment,
        "ports": ports,
        "resources": resources,
    }


def write_ray_service(plan: Plan, image: str) -> str:
    lines = [
        "# Quill on Kubernetes with KubeRay 1.5.1 or newer; its authors never ran it.",
        "# A bundle that is a path must be on every pod: in the image, or on a volume.",
    ]
    if plan.args.settings.api_keys is not None:
        lines.append(f"# Mount a secret with the API keys at {plan.args.settings.api_keys}.")
    return "\n".join([*lines, yaml.dump_all(ray_service(plan, image), Dumper=_Dumper,
                                            sort_keys=False, explicit_start=True)])  # fmt: skip


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Without anchors, and with texts of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _block(dumper: Any, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def _dump(content: Json) -> str:
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False))
