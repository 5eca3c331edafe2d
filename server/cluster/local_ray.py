"""Ray on this machine alone: starts Ray, deploys replicas, reports progress, stops.

Knows: Ray's Python interface. Does not know: who needs a cluster, what is printed.

Ray reads its environment when it is imported, here and in every process that it starts. So this
module imports Ray only when a cluster starts.
"""

import io
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.server.addresses import DIRECTLY, reachable, write_address
from quill.server.cluster.plan import (
    APPLICATION,
    ENVIRONMENT,
    REPLICA,
    Plan,
    ReplicaArgs,
    replica_options,
)
from quill.server.errors import StartError

OBJECT_STORE_BYTES = 100 * 2**20  # calls don't pass through it
HEALTH_TIMEOUT_S = 5.0
OWN_CPUS = 1
POLL_S = 0.2
_OUR_ERROR = re.compile(r"^.*quill\.[\w.]+Error: (.+)$", re.MULTILINE)


class Progress(NamedTuple):
    """Of a deployment."""

    state: str  # DEPLOYING, RUNNING, DEPLOY_FAILED, …
    replicas: dict[str, int]  # how many in each state
    message: str


@contextmanager
def local_ray(plan: Plan, dashboard_port: int | None = None) -> Iterator[None]:
    """Ray with room for the plan's replicas twice: new ones start while old ones stop."""
    # Mode 0700. The name is short: a socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="quill-", ignore_cleanup_errors=True) as directory:
        token = Path(directory) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        os.environ |= ENVIRONMENT | {
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": directory,
            "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call must not start another Ray
        }
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            ray.init(
                num_cpus=max(os.cpu_count() or 1, 2 * plan.max_replicas * plan.cpus + OWN_CPUS),
                include_dashboard=dashboard_port is not None,
                dashboard_port=dashboard_port,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
            )
        except Exception as error:  # Ray has many kinds, plain Exceptions among them
            raise StartError(f"Ray can't start here: {error}") from error
        try:
            yield
        finally:
            with redirect_stdout(io.StringIO()):  # Ray reports that what it ends has ended
                serve.shutdown()
                ray.shutdown()


def deploy(plan: Plan) -> None:
    """Once: another call would replace the replicas."""
    from ray import serve

    from quill.server.cluster.deployment import Replica

    replicas = serve.deployment(Replica).options(**replica_options(plan))
    application = replicas.bind(ReplicaArgs.read(plan.args.plain()))
    target = serve.RunTarget(application, name=APPLICATION, route_prefix=None)
    try:
        serve.start(proxy_location="Disabled")
        serve.run_many([target], wait_for_applications_running=False)
    except Exception as error:
        raise StartError(f"Ray Serve can't start here: {error}") from error


def progress() -> Progress:
    from ray import serve

    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return Progress("DEPLOYING", {}, "")
    replica = found.deployments.get(REPLICA)
    states = {} if replica is None else {str(k): n for k, n in replica.replica_states.items()}
    message = ("" if replica is None else replica.message) or found.message
    return Progress(str(found.status.value), states, own_error(message))


def own_error(message: str) -> str:
    """The text of Quill's error, of Ray's message with the traceback of a replica."""
    ours = _OUR_ERROR.findall(message)
    return str(ours[-1]) if ours else message


def is_serving(plan: Plan) -> bool:
    """HAProxy gets the replicas' addresses a moment after the replicas run."""
    address = write_address(reachable(plan.args.host), plan.args.port)
    with grpc.insecure_channel(address, options=DIRECTLY) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            reply = check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def stop(wait_for_abort: Callable[[float], bool]) -> None:
    """Replicas finish their calls, unless `wait_for_abort` says that they shall not.

    Deletes without a thread: `serve.delete` alone would wait and poll. Ray ends the whole process,
    with exit code 1, when a thread calls it while `ray.shutdown` runs.
    """
    from ray import serve

    serve.delete(APPLICATION, _blocking=False)
    while not wait_for_abort(POLL_S):
        if serve.status().applications.get(APPLICATION) is None:
            return
