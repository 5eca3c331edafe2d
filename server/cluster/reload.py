"""`quill cluster reload`: all replicas in turn, asked for on a machine of the Ray cluster.

Knows: the keeper. Does not know: how replicas reload.
"""

import argparse

from quill.server.cluster.serve_config import APPLICATION, KEEPER
from quill.server.errors import ReloadError

DONE = "every replica has the bundle as it is now"


def run(args: argparse.Namespace) -> None:
    import ray

    ray.init(address="auto", configure_logging=False, log_to_driver=False)
    try:
        reload_all()
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
