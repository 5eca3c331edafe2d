"""Who holds callers to their limits: this process by itself, or several together.

Knows: what a call and a request ask for. Does not know: how limits work, how several agree on them.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from quill.server.auth.caller import Caller
from quill.server.auth.rate_limit import Quotas


class Paying(Protocol):
    """What one request has taken of its caller's tokens so far."""

    is_read: bool  # whether the prompt was; else nothing is owed at the end

    def note(self, num_generated: int) -> None:
        """So many until now."""


class Limiting(Protocol):
    """Both raise QuotaErrors, and last as long as what they let in."""

    def call(self, caller: Caller) -> AbstractAsyncContextManager[None]: ...

    def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> AbstractAsyncContextManager[Paying]: ...


class OwnLimits:
    """By what this process alone has seen."""

    def __init__(self) -> None:
        self._quotas = Quotas()

    @asynccontextmanager
    async def call(self, caller: Caller) -> AsyncIterator[None]:
        with self._quotas.call(caller):
            yield

    @asynccontextmanager
    async def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> AsyncIterator[Paying]:
        with self._quotas.tokens(caller, num_prompt, is_admitted) as spending:
            yield spending
