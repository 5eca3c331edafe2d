"""A replica's part in the cluster: heartbeats, quotas shared with other replicas, reloads in turn.

Knows: the coordinator, what to do without its answers. Does not know: Ray, gRPC, bundles.

While the coordinator doesn't answer, each replica applies quotas by itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from quill.server.auth.shared_quotas import NoAnswerError, SharedQuotas
from quill.server.cluster.coordinator import Coordinator, Heartbeat, Instruction
from quill.server.errors import ReloadError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
MAX_WAIT_S = 2.0  # an answer takes a few milliseconds

Reload = Callable[[], Coroutine[Any, Any, object]]
_Answer = TypeVar("_Answer")


class Membership(SharedQuotas):
    """A Server's quotas, shared with the other replicas. Belongs to one event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        replica: str,
        frontend: str = "",
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(coordinator, replica)
        self._coordinator = coordinator
        self._heartbeat = Heartbeat(replica, "", frontend, False, 0)
        self._is_ready = is_ready
        self._is_draining = False
        self._is_alone = False

    @property
    def replica(self) -> str:
        return self._heartbeat.replica

    async def reload_all(self) -> None:
        """Every replica, this one among them. Raises ReloadError."""
        try:
            error = await self._coordinator.reload()
        except Exception as failure:
            raise ReloadError(f"the cluster's coordinator doesn't answer: {failure}") from failure
        if error:
            raise ReloadError(error)

    async def join(self, address: str, reload: Reload) -> None:
        """Sends heartbeats until it is cancelled, and reloads when the coordinator says so."""
        self._heartbeat = self._heartbeat._replace(address=address)
        while True:
            with suppress(NoAnswerError):
                if (await self._beat()).reload:
                    await self._reload(reload)
            await asyncio.sleep(BEAT_S)

    async def drain(self) -> None:
        """From now on the endpoint pool has this replica as one that takes no new calls."""
        self._is_draining = True
        with suppress(NoAnswerError):
            await self._beat()

    async def leave(self) -> None:
        with suppress(NoAnswerError):
            await self._answer(self._coordinator.leave(self.replica))

    async def _beat(self) -> Instruction:
        heartbeat = self._heartbeat._replace(
            is_ready=self._is_ready() and not self._is_draining,
            generated={ticket: usage.num_generated for ticket, usage in self._open.items()},
        )
        instruction = await self._answer(self._coordinator.beat(heartbeat))
        self._heartbeat = self._heartbeat._replace(slot=instruction.slot)
        return instruction

    async def _reload(self, reload: Reload) -> None:
        """Heartbeats go on: loading may take minutes."""
        loading = asyncio.ensure_future(reload())
        while not (await asyncio.wait({loading}, timeout=BEAT_S))[0]:
            with suppress(NoAnswerError):
                await self._beat()
        error = loading.exception()
        text = "" if error is None else str(error)
        with suppress(NoAnswerError):
            await self._answer(self._coordinator.finish_reload(self.replica, text))

    async def _answer(self, answer: Awaitable[_Answer]) -> _Answer:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                found = await answer
        except Exception as error:  # Ray has many kinds
            if not self._is_alone:
                logger.warning("the coordinator doesn't answer: quotas are per replica (%r)", error)
            self._is_alone = True
            raise NoAnswerError from error
        if self._is_alone:
            logger.info("the coordinator answers again: quotas are the cluster's")
        self._is_alone = False
        return found
