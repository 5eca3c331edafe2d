"""serve.yaml: a plan as Ray Serve reads it, every value with its reason.

Knows: Ray Serve's names. Does not know: Ray itself, who deploys it.
"""

import json
import shlex
from typing import Any

from quill.server.cluster.environment import ray_environment
from quill.server.cluster.plan import Plan
from quill.server.cluster.replica.detour import SERVICERS
from quill.server.cluster.replica.options import write_options

APPLICATION = "quill"
REPLICA = "replica"
KEEPER = "keeper"

_WHY = {
    "bundle": "a directory that every machine has, or a URL that fsspec can read",
    "manifest_sha256": "of manifest.json; null takes whatever is there",
    "precision": "null takes the bundle's fastest",
    "max_num_seqs": "sequences that run at the same time; null: 256 if they fit",
    "context": "tokens of prompt and answer; null: the bundle's",
    "cache_mb": "memory for keys and values; null: 2,048 where there is as much",
    "threads": "of the engine; num_cpus below is as many",
    "spinning": "threads stay awake between steps: faster, if the cores are theirs alone",
    "queue": "requests that may wait in each replica; one more is refused",
    "prefix_cache": "prefix caching: sequences with a shared prefix share its KV blocks",
    "speculative": "speculative decoding by prompt lookup, where it is faster; it changes no token",
    "api_keys": "a file of every machine, by `quill keys add`; null: anybody may call",
    "open_reflection": "to callers without a key",
    "open_metrics": "as well",
    "share_prefix_cache": "between callers of different keys",
    "metrics_host": "where each replica shows its metrics",
    "metrics_port": "the first of a hundred: each replica takes a free one; null: none",
    "one_machine": "true: replicas listen at the loopback only",
    "tracing": "send OpenTelemetry spans, from each replica",
    "log_format": "text or json; Ray keeps replicas' logs as worker-*.err",
}


def write_serve_config(plan: Plan) -> str:
    return _HEAD.format(environment=_exports(plan)) + "\n".join(
        [
            *_doors(plan),
            "applications:",
            f"  - name: {APPLICATION}",
            "    route_prefix: /",
            "    import_path: quill.server.cluster.app:build",
            "    args: # of each replica, as `quill serve` has them",
            *_args(plan),
            "    deployments:",
            *_replica(plan),
            *_keeper(),
            "",
        ]
    )


_HEAD = """\
# Quill on Ray 2.60.0. Deploy with `serve deploy serve.yaml`, on a cluster whose every machine has
# quill[cluster] installed and was started, by `ray start`, with this environment. The token is
# ~/.ray/auth_token, the same on each; `ray get-auth-token --generate` makes one (or
# RAY_AUTH_TOKEN_PATH names another file):
{environment}
# Ray speaks in the clear: end TLS in front of it. Who changes num_replicas below and deploys again
# only rescales; a change under args puts new replicas in the place of the old, a few at a time.
"""


def _exports(plan: Plan) -> str:
    values = ray_environment(plan.longest_answer_s, plan.drain_s)
    return "\n".join(f"#   export {name}={_for_bash(value)}" for name, value in values.items())


def _for_bash(value: str) -> str:
    """In one line."""
    return value if value == shlex.quote(value) else f"${value!r}"


def _doors(plan: Plan) -> list[str]:
    return [
        "proxy_location: EveryNode # an HAProxy on each machine that has replicas",
        "http_options:",
        f"  host: {_value(plan.host)} # of the gRPC door, too",
        f"  port: {plan.http_port} # Ray's own health alone: Quill's HTTP isn't offered",
        "grpc_options:",
        f"  port: {plan.port} # what clients call",
        "  grpc_servicer_functions:",
        *(f"    - {each}" for each in SERVICERS),
    ]


def _args(plan: Plan) -> list[str]:
    values = write_options(plan.options)
    return [f"      {name}: {_value(value)} # {_WHY[name]}" for name, value in values.items()]


def _replica(plan: Plan) -> list[str]:
    return [
        f"      - name: {REPLICA}",
        "        ray_actor_options:",
        f"          num_cpus: {plan.cpus}",
        *_count(plan),
        "        max_surge_percent: 25 # new replicas are ready before old ones go",
        f"        max_ongoing_requests: {plan.max_requests} # rows and queue; replicas refuse more",
        f"        graceful_shutdown_timeout_s: {plan.shutdown_s:g} # drain and longest answer",
        "        graceful_shutdown_wait_loop_s: 1",
        "        health_check_period_s: 5 # a replica whose steps hang or fail is replaced",
        "        health_check_timeout_s: 30",
    ]


def _count(plan: Plan) -> list[str]:
    if plan.least == plan.most:
        return [f"        num_replicas: {plan.least}"]
    return [
        "        autoscaling_config:",
        f"          min_replicas: {plan.least}",
        f"          max_replicas: {plan.most}",
        "          policy: # by requests that run or wait, not by the processor's time",
        "            policy_function: quill.server.cluster.scaling:wanted_replicas",
        f"          target_ongoing_requests: {plan.target_requests} # of each replica",
        f"          upscale_delay_s: {plan.upscale_delay_s:g} # so long there must have been more",
        f"          downscale_delay_s: {plan.downscale_delay_s:g} # or fewer",
        "          look_back_period_s: 15 # over which requests are averaged",
    ]


def _keeper() -> list[str]:
    return [
        f"      - name: {KEEPER} # keys' limits of the whole cluster, and the turns of a reload",
        "        num_replicas: 1 # more would each count for itself",
        "        max_ongoing_requests: 10000",
        "        ray_actor_options:",
        "          num_cpus: 0 # it waits, mostly",
    ]


def _value(value: Any) -> str:
    """JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
