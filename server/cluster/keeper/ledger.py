"""What callers have taken of their limits, through all replicas together.

Knows: limits, replicas' tickets. Does not know: Ray, calls, time between machines.

A ticket stands for what a replica has let in: a call, or the tokens of a request. The replica makes
its number, hands it in when it asks, and gives it back at the end. Those of a replica that isn't
heard of any more are given back for it.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from quill.server.auth.caller import Caller
from quill.server.auth.quota import Quotas, QuotaUsage
from quill.server.errors import QuotaError

MAX_SILENCE_S = 10.0  # of a replica, which is heard twice a second


@dataclass(frozen=True)
class Refusal:
    """A QuotaError, as it travels."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True)
class _Ticket:
    held: AbstractContextManager[QuotaUsage | None]
    spending: QuotaUsage | None


class Ledger:
    """Belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quotas = Quotas(clock)
        self._tickets: dict[str, dict[int, _Ticket]] = {}
        self._heard_s: dict[str, float] = {}

    @property
    def replicas(self) -> list[str]:
        """That are heard of."""
        return list(self._heard_s)

    def open_call(self, replica: str, ticket: int, caller: Caller) -> Refusal | None:
        return self._open(replica, ticket, self._quotas.call(caller))

    def open_tokens(
        self, replica: str, ticket: int, caller: Caller, num_prompt: int, is_admitted: bool
    ) -> Refusal | None:
        return self._open(replica, ticket, self._quotas.tokens(caller, num_prompt, is_admitted))

    def close(self, replica: str, ticket: int, num_generated: int, is_read: bool) -> None:
        found = self._tickets.get(replica, {}).pop(ticket, None)
        if found is None:
            return  # given back for it already
        if found.spending is not None:
            found.spending.is_read = is_read
            found.spending.note(num_generated)
        found.held.__exit__(None, None, None)

    def hear(self, replica: str, generated: Mapping[int, int]) -> None:
        """A sign of life, and how many tokens its open requests have by now."""
        self._heard_s[replica] = self._clock()
        for ticket, num_generated in generated.items():
            found = self._tickets.get(replica, {}).get(ticket)
            if found is not None and found.spending is not None:
                found.spending.is_read = num_generated > 0
                found.spending.note(num_generated)

    def forget_silent(self) -> None:
        now_s = self._clock()
        for replica, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > MAX_SILENCE_S:
                self.forget(replica)

    def forget(self, replica: str) -> None:
        self._heard_s.pop(replica, None)
        for ticket in self._tickets.pop(replica, {}).values():
            ticket.held.__exit__(None, None, None)

    def _open(
        self, replica: str, number: int, held: AbstractContextManager[QuotaUsage | None]
    ) -> Refusal | None:
        try:
            spending = held.__enter__()
        except QuotaError as error:
            return Refusal(str(error), error.retry_after_s)
        self._heard_s.setdefault(replica, self._clock())
        self._tickets.setdefault(replica, {})[number] = _Ticket(held, spending)
        return None
