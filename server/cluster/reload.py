"""`quill cluster reload`: all replicas in turn, asked for on a machine of the Ray cluster.

Knows: the keeper. Does not know: how replicas reload.
"""

import argparse
import logging

from quill.server.cluster.serve_config import APPLICATION, KEEPER
from quill.server.errors import ReloadError

DONE = "every replica has the bundle as it is now"
_HINT = (
    "run it on one of its machines, with the environment and the token of `ray start`. "
    "`quill cluster up` reloads when it gets SIGHUP"
)


def run(args: argparse.Namespace) -> None:
    import ray
    from ray.serve.exceptions import RayServeException

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(address="auto", configure_logging=False, log_to_driver=False)
    except Exception as error:  # Ray has many kinds
        raise ReloadError(f"no Ray cluster can be reached from here: {_HINT} ({error})") from error
    try:
        reload_all()
    except RayServeException as error:
        raise ReloadError(f"this Ray cluster has no application {APPLICATION}: {error}") from error
    finally:
        ray.shutdown()
    print(DONE)


def reload_all() -> None:
    """Where Ray is reached already. Raises ReloadError."""
    from ray import serve

    keeper = serve.get_deployment_handle(KEEPER, APPLICATION)
    # With the environment that replicas have, it would want an event loop of ours, to the end.
    if not keeper.is_initialized:
        keeper._init(_run_router_in_separate_loop=True)
    refusal = keeper.reload.remote().result()
    if refusal:
        raise ReloadError(refusal)
