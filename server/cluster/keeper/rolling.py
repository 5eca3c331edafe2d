"""A reload of all replicas, one after the other.

Knows: replicas by name, turns. Does not know: Ray, bundles, how a replica is told.

A replica is told that it is its turn when it is next heard of. The first that refuses the bundle
ends the reload: those after it haven't been asked, and go on as they are.
"""

import asyncio
from collections.abc import Callable, Sequence

POLL_S = 0.1


class Rolling:
    """Belongs to one event loop."""

    def __init__(self, replicas: Callable[[], Sequence[str]]) -> None:
        """`replicas`: those that are there now."""
        self._replicas = replicas
        self._turn: str | None = None
        self._outcome: asyncio.Future[str] | None = None
        self._reloading = asyncio.Lock()

    def is_turn(self, replica: str) -> bool:
        return replica == self._turn

    def settle(self, replica: str, refusal: str) -> None:
        """How it went; "" if it went well."""
        if replica == self._turn and self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(refusal)

    async def reload(self) -> str:
        """Why it was refused; "" if all have the new bundle."""
        async with self._reloading:
            done: list[str] = []
            for replica in self._replicas():
                refusal = await self._reload(replica)
                if refusal:
                    return _tell(refusal, len(done), len(self._replicas()))
                done.append(replica)
            return ""

    async def _reload(self, replica: str) -> str:
        self._turn, self._outcome = replica, asyncio.get_running_loop().create_future()
        try:
            while replica in self._replicas():
                done, _ = await asyncio.wait({self._outcome}, timeout=POLL_S)
                if done:
                    return self._outcome.result()
            return ""  # it has gone; whoever takes its place loads what is there now
        finally:
            self._turn = None


def _tell(refusal: str, num_done: int, num_all: int) -> str:
    if not num_done:
        return refusal
    return (
        f"{num_done} of {num_all} replicas have the new bundle; the next one refuses it, so the "
        f"others weren't asked: {refusal}"
    )
