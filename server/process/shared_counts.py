"""What a frontend counts together with the others of its server, by asking the supervisor.

Knows: the link to the supervisor. Does not know: how it counts, calls.

Each request costs a message for its place in the queue, and those of callers with quotas a few
more. With one frontend nobody is asked.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from quill.server.auth.caller import Caller, QuotaUsage
from quill.server.auth.shared_quotas import SharedQuotas
from quill.server.errors import PlainError, read_error, rejection_of
from quill.server.process.control import (
    Admit,
    Close,
    Collect,
    Generated,
    Left,
    OpenCall,
    OpenTokens,
)
from quill.server.process.supervisor_link import SupervisorLink
from quill.server.telemetry.merged_metrics import Family

# How long a full queue is taken for full: clients are told to come back later than that.
FULL_S = 0.02


class SharedAdmission:
    """The queue of all frontends."""

    def __init__(self, link: SupervisorLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._waiting: set[str] = set()  # of this frontend
        self._full: dict[str, tuple[float, PlainError]] = {}  # owners without a place: since when

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve(self, owner: str) -> None:
        """Rejects by what the process that counts said a moment ago: it is asked once for a
        request. So no place is reserved."""
        since_s, error = self._full.get(owner, (0.0, None))
        if error is not None and self._clock() - since_s < FULL_S:
            raise read_error(error)

    async def admit(
        self, request_id: str, owner: str, deadline_s: float | None, place: str | None = None
    ) -> None:
        self._waiting.add(request_id)
        answer = await self._link.ask(lambda number: Admit(number, request_id, owner, deadline_s))
        if answer.error is not None:
            self._waiting.discard(request_id)
            error = read_error(answer.error)
            if rejection_of(error) in ("queue_full", "key_queue_share"):
                self._full[owner] = self._clock(), answer.error
            raise error

    def leave(self, started: Sequence[str], failed: Sequence[str]) -> None:
        failed = [each for each in failed if each in self._waiting]
        self._waiting.difference_update(started, failed)
        if started or failed:
            self._link.tell(Left(list(started), failed))


class _Office:
    """The supervisor's tickets."""

    def __init__(self, link: SupervisorLink) -> None:
        self._link = link

    async def open_call(self, holder: str, ticket: int, caller: Caller) -> PlainError | None:
        return (await self._link.ask(lambda number: OpenCall(number, ticket, caller))).error

    async def open_tokens(
        self, holder: str, ticket: int, caller: Caller, num_prompt: int, is_admitted: bool
    ) -> PlainError | None:
        answer = await self._link.ask(
            lambda number: OpenTokens(number, ticket, caller, num_prompt, is_admitted)
        )
        return answer.error

    async def close(self, holder: str, ticket: int, num_generated: int, is_read: bool) -> None:
        await self._link.ask(lambda number: Close(number, ticket, num_generated, is_read))


class _ReportedUsage(QuotaUsage):
    """The supervisor learns of each change, of all requests once in a turn of the event loop."""

    def __init__(self, quotas: "SupervisedQuotas", ticket: int) -> None:
        super().__init__()
        self._report = partial(quotas.report, ticket)

    def note(self, num_generated: int) -> None:
        if num_generated != self.num_generated:
            self._report(num_generated)
        super().note(num_generated)


class SupervisedQuotas(SharedQuotas):
    """Quotas of all frontends."""

    def __init__(self, link: SupervisorLink) -> None:
        super().__init__(_Office(link), "")
        self._link = link
        self._unreported: dict[int, int] = {}

    def report(self, ticket: int, num_generated: int) -> None:
        if not self._unreported:
            asyncio.get_running_loop().call_soon(self._send)
        self._unreported[ticket] = num_generated

    def _new_usage(self, ticket: int) -> QuotaUsage:
        return _ReportedUsage(self, ticket)

    def _send(self) -> None:
        unreported, self._unreported = self._unreported, {}
        self._link.tell(Generated(unreported))


async def merged_metrics(link: SupervisorLink) -> list[Family]:
    """Of all frontends, as they are now."""
    return (await link.ask(Collect)).metrics
