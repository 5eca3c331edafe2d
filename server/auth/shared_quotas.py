"""Quotas that several processes share, as one of them asks for them.

Knows: callers with quotas, what to do without an answer. Does not know: how the question travels.

Only callers with quotas cost messages: one to open a call, one to close it. While nobody answers,
each process applies quotas by itself; no call is rejected for want of an answer.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from quill.server.auth.caller import Caller, QuotaUsage, RateLimits
from quill.server.errors import PlainError, read_error

_Answer = TypeVar("_Answer")


class NoAnswerError(Exception):
    """Whoever counts didn't answer in time, or not at all."""


class TicketOffice(Protocol):
    """Tickets in another process."""

    async def open_call(self, holder: str, ticket: int, caller: Caller, /) -> PlainError | None: ...
    async def open_tokens(
        self, holder: str, ticket: int, caller: Caller, num_prompt: int, is_admitted: bool, /
    ) -> PlainError | None: ...
    async def close(
        self, holder: str, ticket: int, num_generated: int, is_read: bool, /
    ) -> None: ...


class SharedQuotas(RateLimits):
    """Belongs to one event loop."""

    def __init__(self, office: TicketOffice, holder: str) -> None:
        super().__init__()
        self._office = office
        self._holder = holder
        self._numbers = itertools.count()
        self._open: dict[int, QuotaUsage] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def call(self, caller: Caller) -> AsyncIterator[None]:
        if caller.requests_per_minute is None and caller.max_concurrent is None:
            yield
            return
        ticket = next(self._numbers)
        answer = self._office.open_call(self._holder, ticket, caller)
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
        answer = self._office.open_tokens(self._holder, ticket, caller, num_prompt, is_admitted)
        own = super().tokens(caller, num_prompt, is_admitted)
        async with self._admitted(ticket, answer, own) as usage:
            yield usage

    @asynccontextmanager
    async def _admitted(
        self,
        ticket: int,
        answer: Awaitable[PlainError | None],
        own: AbstractAsyncContextManager[QuotaUsage | None],
    ) -> AsyncIterator[QuotaUsage]:
        """By whoever counts, or, without an answer, by this process's `own` quotas."""
        try:
            await self._enter(ticket, answer)
        except NoAnswerError:
            async with own as usage:
                yield usage or QuotaUsage()
            return
        self._open[ticket] = self._new_usage(ticket)
        try:
            yield self._open[ticket]
        finally:
            # Before the client gets the end of this call, after which it may call again.
            await asyncio.shield(self._begin(self._close(ticket, self._open.pop(ticket))))

    def _new_usage(self, ticket: int) -> QuotaUsage:
        return QuotaUsage()

    async def _enter(self, ticket: int, answer: Awaitable[PlainError | None]) -> None:
        waiting = self._begin(self._answer(answer))
        try:
            error = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(lambda late: self._begin(self._undo(late, ticket)))
            raise
        if error is not None:
            raise read_error(error)

    async def _undo(self, late: "asyncio.Future[Any]", ticket: int) -> None:
        """The caller left before the answer came: an admitted call ends now."""
        with suppress(NoAnswerError):
            if await late is None:
                await self._close(ticket, QuotaUsage())

    async def _close(self, ticket: int, usage: QuotaUsage) -> None:
        with suppress(NoAnswerError):
            await self._answer(
                self._office.close(self._holder, ticket, usage.num_generated, usage.is_read)
            )

    async def _answer(self, answer: Awaitable[_Answer]) -> _Answer:
        """Raises NoAnswerError."""
        return await answer

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
