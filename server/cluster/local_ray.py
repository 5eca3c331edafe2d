"""Ray on this machine alone: started, told what to deploy, asked how it goes, ended.

Knows: Ray's Python interface. Does not know: who wants it, what is printed.

Ray reads its environment when it is imported, here and in every process that it starts. So it is
imported when a cluster begins.
"""

import io
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.server.addresses import DIRECTLY, reachable, write_address
from quill.server.cluster.environment import ray_environment
from quill.server.cluster.plan import Plan
from quill.server.cluster.serve_config import APPLICATION, REPLICA, write_serve_config
from quill.server.errors import StartError

OBJECT_STORE_BYTES = 100 * 2**20  # calls don't pass through it
HEALTH_TIMEOUT_S = 5.0
OWN_CPUS = 1  # and twice those of the replicas: new ones begin while old ones end
POLL_S = 0.2
_OUR_ERROR = re.compile(r"^quill\.[\w.]+: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """How far a deployment is."""

    state: str  # DEPLOYING, RUNNING, DEPLOY_FAILED, …
    replicas: dict[str, int]  # how many in each state
    message: str

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def has_failed(self) -> bool:
        return self.state in ("DEPLOY_FAILED", "UNHEALTHY")


class LocalCluster:
    """Between `local_cluster`'s beginning and its end."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def deploy(self, plan: Plan) -> None:
        """The first time, or changed: another number of replicas only rescales."""
        from ray.serve.schema import ServeDeploySchema

        config = ServeDeploySchema.model_validate(yaml.safe_load(write_serve_config(plan)))
        self._client.deploy_apps(config)

    def answers(self, plan: Plan) -> bool:
        """HAProxy hears of replicas a moment after they run."""
        address = write_address(reachable(plan.host), plan.port)
        with grpc.insecure_channel(address, options=DIRECTLY) as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            try:
                reply = ask(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def end(self, at_once: threading.Event) -> None:
        """Lets replicas finish what they have, until `at_once`. Serve's own shutdown ends HAProxy
        first, and every stream with it."""
        from ray import serve

        serve.delete(APPLICATION, _blocking=False)
        while not at_once.wait(POLL_S):
            if serve.status().applications.get(APPLICATION) is None:
                return

    def progress(self) -> Progress:
        from ray import serve

        found = serve.status().applications.get(APPLICATION)
        if found is None:
            return Progress("DEPLOYING", {}, "")
        replica = found.deployments.get(REPLICA)
        states = {} if replica is None else {str(k): n for k, n in replica.replica_states.items()}
        message = ("" if replica is None else replica.message) or found.message
        return Progress(str(found.status.value), states, _own_words(message))


def _own_words(message: str) -> str:
    """Of Ray's, which has the whole traceback of a replica that doesn't start."""
    ours = _OUR_ERROR.findall(message)
    return str(ours[-1]) if ours else message


@contextmanager
def local_cluster(plan: Plan, dashboard: bool = False) -> Iterator[LocalCluster]:
    with _own_directory() as directory:
        os.environ |= ray_environment(plan.longest_answer_s, plan.drain_s, directory)
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            _start_ray(plan, directory, dashboard)
            try:
                yield LocalCluster(_start_serve(plan))
            finally:
                with redirect_stdout(io.StringIO()):  # Ray complains that what it ends has ended
                    serve.shutdown()
        finally:
            with redirect_stdout(io.StringIO()):
                ray.shutdown()


@contextmanager
def _own_directory() -> Iterator[Path]:
    """With a token for this cluster. Its name is short: a socket's path has 107 characters."""
    directory = Path(tempfile.mkdtemp(prefix="quill-"))  # nobody else's: 0700
    try:
        (directory / "token").write_text(secrets.token_hex(32))
        (directory / "token").chmod(0o600)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start_ray(plan: Plan, directory: Path, dashboard: bool) -> None:
    import ray

    num_cpus = max(os.cpu_count() or 1, 2 * plan.most * plan.cpus + OWN_CPUS)
    try:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=dashboard,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(directory / "ray"),
        )
    except Exception as error:  # Ray has many kinds, and plain Exceptions among them
        raise StartError(f"Ray can't start here: {error}") from error


def _start_serve(plan: Plan) -> Any:
    from ray.serve._private.api import serve_start
    from ray.serve.config import gRPCOptions

    config = yaml.safe_load(write_serve_config(plan))
    try:
        return serve_start(
            http_options=config["http_options"],
            proxy_location=config["proxy_location"],
            grpc_options=gRPCOptions(**config["grpc_options"]),
        )
    except Exception as error:
        raise StartError(f"Ray Serve can't start here: {error}") from error
