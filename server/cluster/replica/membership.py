"""A replica's part in the cluster: it is heard of, holds callers to common limits, reloads in turn.

Knows: the keeper, what to do while it doesn't answer. Does not know: Ray, gRPC, bundles.

Only callers with limits cost a message: one to come in, one to leave. While the keeper doesn't
answer, replicas count for themselves: a limit then holds for each of them, and nobody is refused
for want of an answer.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from quill.server.auth.caller import Caller
from quill.server.auth.quota import QuotaUsage, RateLimits
from quill.server.cluster.keeper.ledger import Refusal
from quill.server.errors import QuotaError, ReloadError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
MAX_ASKING_S = 2.0  # an answer takes a few milliseconds

Reload = Callable[[], Coroutine[Any, Any, object]]
_Answer = TypeVar("_Answer")


class KeeperCalls(Protocol):
    """The keeper, however it is reached. Whatever goes wrong on the way is an exception."""

    def open_call(self, replica: str, ticket: int, caller: Caller) -> Awaitable[Refusal | None]: ...

    def open_tokens(
        self, replica: str, ticket: int, caller: Caller, num_prompt: int, is_admitted: bool
    ) -> Awaitable[Refusal | None]: ...

    def close(
        self, replica: str, ticket: int, num_generated: int, is_read: bool
    ) -> Awaitable[None]: ...

    def hear(self, replica: str, generated: Mapping[int, int]) -> Awaitable[bool]: ...

    def settle(self, replica: str, refusal: str) -> Awaitable[None]: ...

    def leave(self, replica: str) -> Awaitable[None]: ...

    def reload(self) -> Awaitable[str]: ...


class KeeperSilentError(Exception):
    """It didn't answer in time, or not at all."""


class Membership(RateLimits):
    """Belongs to the event loop. It is what a Server asks for its callers' limits."""

    def __init__(self, keeper: KeeperCalls, replica: str) -> None:
        super().__init__()
        self._keeper = keeper
        self._replica = replica
        self._numbers = itertools.count()
        self._open: dict[int, QuotaUsage] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_silent = False

    @asynccontextmanager
    async def call(self, caller: Caller) -> AsyncIterator[None]:
        if caller.requests_per_minute is None and caller.max_concurrent is None:
            yield
            return
        ticket = next(self._numbers)
        try:
            await self._enter(ticket, self._keeper.open_call(self._replica, ticket, caller))
        except KeeperSilentError:
            async with super().call(caller):
                yield
            return
        try:
            yield
        finally:
            # Before the client hears that it is over: it may call again at once.
            await self._leave(ticket, QuotaUsage())

    @asynccontextmanager
    async def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> AsyncIterator[QuotaUsage]:
        if caller.tokens_per_minute is None:
            yield QuotaUsage()
            return
        ticket, paying = next(self._numbers), QuotaUsage()
        ask = self._keeper.open_tokens(self._replica, ticket, caller, num_prompt, is_admitted)
        try:
            await self._enter(ticket, ask)
        except KeeperSilentError:
            async with super().tokens(caller, num_prompt, is_admitted) as own:
                yield own
            return
        self._open[ticket] = paying
        try:
            yield paying
        finally:
            del self._open[ticket]
            await self._leave(ticket, paying)

    async def reload_all(self) -> None:
        """Every replica, this one among them. Raises ReloadError."""
        try:
            refusal = await self._keeper.reload()
        except Exception as error:
            raise ReloadError(f"the cluster's keeper doesn't answer: {error}") from error
        if refusal:
            raise ReloadError(refusal)

    async def beat(self, reload: Reload) -> None:
        """Until it is cancelled: says that this replica is there, and reloads when told to."""
        while True:
            generated = {ticket: each.num_generated for ticket, each in self._open.items()}
            with suppress(KeeperSilentError):
                if await self._ask(self._keeper.hear(self._replica, generated)):
                    await self._reload(reload)
            await asyncio.sleep(BEAT_S)

    async def leave(self) -> None:
        with suppress(KeeperSilentError):
            await self._ask(self._keeper.leave(self._replica))

    async def _reload(self, reload: Reload) -> None:
        """Meanwhile it is still heard of: loading may take minutes."""
        loading = asyncio.ensure_future(reload())
        while not (await asyncio.wait({loading}, timeout=BEAT_S))[0]:
            with suppress(KeeperSilentError):
                await self._ask(self._keeper.hear(self._replica, {}))
        error = loading.exception()
        with suppress(KeeperSilentError):
            await self._ask(self._keeper.settle(self._replica, "" if error is None else str(error)))

    async def _enter(self, ticket: int, ask: Awaitable[Refusal | None]) -> None:
        asking = self._begin(self._ask(ask))
        try:
            refusal = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: self._begin(self._regret(asked, ticket)))
            raise
        if refusal is not None:
            raise QuotaError(refusal.reason, refusal.retry_after_s)

    async def _regret(self, asked: "asyncio.Future[Any]", ticket: int) -> None:
        """Whoever asked left before the answer came: if it was let in, it is out again."""
        with suppress(KeeperSilentError):
            if await asked is None:
                await self._give_back(ticket, QuotaUsage())

    async def _leave(self, ticket: int, paying: QuotaUsage) -> None:
        await asyncio.shield(self._begin(self._give_back(ticket, paying)))

    async def _give_back(self, ticket: int, paying: QuotaUsage) -> None:
        with suppress(KeeperSilentError):
            await self._ask(
                self._keeper.close(self._replica, ticket, paying.num_generated, paying.is_read)
            )

    async def _ask(self, ask: Awaitable[_Answer]) -> _Answer:
        try:
            async with asyncio.timeout(MAX_ASKING_S):
                answer = await ask
        except Exception as error:  # of Ray's there are many kinds, and all mean the same here
            self._note(True, error)
            raise KeeperSilentError from error
        self._note(False)
        return answer

    def _note(self, is_silent: bool, error: Exception | None = None) -> None:
        if is_silent and not self._is_silent:
            logger.warning("the keeper doesn't answer: limits hold for each replica (%r)", error)
        elif self._is_silent and not is_silent:
            logger.info("the keeper answers again: limits hold for the cluster")
        self._is_silent = is_silent

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
