"""`quill cluster reload`: all replicas in turn, asked for on a machine of the Ray cluster.

Knows: the keeper. Does not know: how replicas reload.
"""

import argparse
import asyncio

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
    refusal = asyncio.run(_ask())
    if refusal:
        raise ReloadError(refusal)


async def _ask() -> str:
    """In an event loop: with the environment that replicas have, handles want one."""
    from ray import serve

    answer: str = await serve.get_deployment_handle(KEEPER, APPLICATION).reload.remote()
    return answer
