"""Quotas that several processes share, counted in one of them.

Knows: quotas, tickets, the processes that hold them by name. Does not know: how they ask.

A ticket stands for one admitted call, or for the tokens of one request. Its holder numbers its
tickets, and closes each at the end; the tickets of a holder that has died are closed for it.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from quill.server.auth.caller import Caller, Quotas, QuotaUsage
from quill.server.errors import PlainError, QuotaError, plain_error


class _Ticket(NamedTuple):
    held: AbstractContextManager[QuotaUsage | None]
    usage: QuotaUsage | None


class Tickets:
    """`open_call` and `open_tokens` return an error, or None if the ticket is open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas = Quotas(clock)
        self._open: dict[tuple[str, int], _Ticket] = {}

    def open_call(self, holder: str, number: int, caller: Caller) -> PlainError | None:
        return self._enter(holder, number, self._quotas.call(caller))

    def open_tokens(
        self, holder: str, number: int, caller: Caller, num_prompt: int, is_admitted: bool
    ) -> PlainError | None:
        return self._enter(holder, number, self._quotas.tokens(caller, num_prompt, is_admitted))

    def note(self, holder: str, num_generated: Mapping[int, int]) -> None:
        """Tokens so far, by ticket."""
        for number, num in num_generated.items():
            ticket = self._open.get((holder, number))
            if ticket is not None and ticket.usage is not None:
                ticket.usage.is_read = num > 0
                ticket.usage.note(num)

    def close(self, holder: str, number: int, num_generated: int, is_read: bool) -> None:
        """One that was closed for its holder is ignored."""
        ticket = self._open.pop((holder, number), None)
        if ticket is None:
            return
        if ticket.usage is not None:
            ticket.usage.is_read = is_read
            ticket.usage.note(num_generated)
        ticket.held.__exit__(None, None, None)

    def close_all(self, holder: str) -> None:
        for key in [key for key in self._open if key[0] == holder]:
            self._open.pop(key).held.__exit__(None, None, None)

    def _enter(
        self, holder: str, number: int, held: AbstractContextManager[QuotaUsage | None]
    ) -> PlainError | None:
        try:
            usage = held.__enter__()
        except QuotaError as error:
            return plain_error(error)
        self._open[holder, number] = _Ticket(held, usage)
        return None
