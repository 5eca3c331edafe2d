"""A replica's part in the cluster: heartbeats, quotas shared with other replicas, reloads in turn.

Knows: the coordinator, what to do without its answers. Does not know: Ray, gRPC, bundles.

Only callers with quotas cost messages: one to open a call, one to close it. While the coordinator
doesn't answer, each replica applies quotas by itself; no call is rejected for want of an answer.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

from quill.server.auth.caller import Caller, QuotaUsage, RateLimits
from quill.server.cluster.coordinator import Coordinator, Heartbeat, Instruction, Rejection
from quill.server.errors import QuotaError, ReloadError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
MAX_WAIT_S = 2.0  # an answer takes a few milliseconds

Reload = Callable[[], Coroutine[Any, Any, object]]
_Answer = TypeVar("_Answer")


class NoAnswerError(Exception):
    """The coordinator didn't answer in time, or not at all."""


class Membership(RateLimits):
    """A Server's quotas, shared with the other replicas. Belongs to one event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        replica: str,
        frontend: str = "",
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._coordinator = coordinator
        self._heartbeat = Heartbeat(replica, "", frontend, False, 0)
        self._is_ready = is_ready
        self._is_draining = False
        self._numbers = itertools.count()
        self._open: dict[int, QuotaUsage] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_alone = False

    @property
    def replica(self) -> str:
        return self._heartbeat.replica

    @asynccontextmanager
    async def call(self, caller: Caller) -> AsyncIterator[None]:
        if caller.requests_per_minute is None and caller.max_concurrent is None:
            yield
            return
        ticket = next(self._numbers)
        answer = self._coordinator.open_call(self.replica, ticket, caller)
        async with self._admitted(ticket, answer, super().call(caller)):
            yield

    @asynccontextmanager
    async def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> AsyncIterator[QuotaUsage]:
        if caller.tokens_per_minute is None:
            yield QuotaUsage()
            return
        ticket = next(self._numbers)
        answer = self._coordinator.open_tokens(
            self.replica, ticket, caller, num_prompt, is_admitted
        )
        own = super().tokens(caller, num_prompt, is_admitted)
        async with self._admitted(ticket, answer, own) as usage:
            yield usage

    @asynccontextmanager
    async def _admitted(
        self,
        ticket: int,
        answer: Awaitable[Rejection | None],
        own: AbstractAsyncContextManager[QuotaUsage | None],
    ) -> AsyncIterator[QuotaUsage]:
        """By the coordinator, or, without an answer, by this replica's `own` quotas."""
        try:
            await self._enter(ticket, answer)
        except NoAnswerError:
            async with own as usage:
                yield usage or QuotaUsage()
            return
        self._open[ticket] = QuotaUsage()
        try:
            yield self._open[ticket]
        finally:
            # Before the client gets the end of this call, after which it may call again.
            await asyncio.shield(self._begin(self._close(ticket, self._open.pop(ticket))))

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

    async def _enter(self, ticket: int, answer: Awaitable[Rejection | None]) -> None:
        waiting = self._begin(self._answer(answer))
        try:
            rejection = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(lambda late: self._begin(self._undo(late, ticket)))
            raise
        if rejection is not None:
            raise QuotaError(*rejection)

    async def _undo(self, late: "asyncio.Future[Any]", ticket: int) -> None:
        """The caller left before the answer came: an admitted call ends now."""
        with suppress(NoAnswerError):
            if await late is None:
                await self._close(ticket, QuotaUsage())

    async def _close(self, ticket: int, usage: QuotaUsage) -> None:
        with suppress(NoAnswerError):
            await self._answer(
                self._coordinator.close(self.replica, ticket, usage.num_generated, usage.is_read)
            )

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

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
