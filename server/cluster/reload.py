"""`quill cluster reload`: all replicas in turn, asked for on a machine of the Ray cluster.

Knows: the keeper. Does not know: how replicas reload.
"""

import argparse

from quill.server.cluster.serve_config import APPLICATION, KEEPER
from quill.server.errors import ReloadError


def run(args: argparse.Namespace) -> None:
    import ray
    from ray import serve

    ray.init(address="auto", configure_logging=False, log_to_driver=False)
    try:
        keeper = serve.get_deployment_handle(KEEPER, APPLICATION)
        refusal = keeper.reload.remote().result()
    finally:
        ray.shutdown()
    if refusal:
        raise ReloadError(refusal)
    print("every replica has the bundle as it is now")
