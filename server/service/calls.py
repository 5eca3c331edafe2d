"""Every call from its beginning to its one end: who makes it, within which limits, how it ended.

Knows: callers, records, that there are limits. Does not know: what calls do, which door they take.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ParamSpec, TypeVar, cast

from quill.server.auth.quota import RateLimits
from quill.server.errors import InvalidFieldError, RequestError, StepError, status_name
from quill.server.service.origin import Origin
from quill.server.telemetry.call_record import Record

logger = logging.getLogger(__name__)

ROUNDING = 0.01
SLACK_S = 0.01  # clocks are read at different moments

_Parameters = ParamSpec("_Parameters")
_Value = TypeVar("_Value")


def raising_context(
    make: Callable[_Parameters, AsyncIterator[_Value]],
) -> Callable[_Parameters, AbstractAsyncContextManager[_Value, None]]:
    """An asynccontextmanager that promises to raise where its body raised.

    So mypy knows that a method whose body returns a response always returns one.
    """
    return cast(
        "Callable[_Parameters, AbstractAsyncContextManager[_Value, None]]",
        asynccontextmanager(make),
    )


class Calls:
    """`report` is told of each call when it has ended."""

    def __init__(self, report: Callable[[Record], None], limits: RateLimits | None = None) -> None:
        self.report = report
        self.limits = limits or RateLimits()
        self._num_open = 0
        self._changed_s = 0.0  # when a call began or ended

    @raising_context
    async def call(self, origin: Origin) -> AsyncIterator[Record]:
        """Every call ends once, with a status of its own, and is accounted for.

        Raises RequestErrors only, whatever its body raised, and lets a cancellation through.
        """
        record = _record(origin)
        self._note(1)
        try:
            async with self.limits.call(origin.caller):
                yield record
        except RequestError as error:
            _note_error(record, error)
            raise
        except asyncio.CancelledError:
            record.outcome = "CANCELLED"
            if _is_past(origin.deadline_s, record.arrived_s):
                record.outcome = "DEADLINE_EXCEEDED"
            raise
        except Exception as bug:
            logger.exception("a bug in %s, request %s", origin.method, record.request_id)
            failure = StepError(f"a bug in the server; its log has more under {record.request_id}")
            _note_error(record, failure)
            raise failure from bug
        finally:
            self._note(-1)
            record.close()
            self.report(record)

    def refuse(self, origin: Origin, error: RequestError) -> None:
        """A call that ended before it began is accounted for, too. No quota pays for it."""
        record = _record(origin)
        _note_error(record, error)
        record.close()
        self.report(record)

    def _note(self, change: int) -> None:
        self._num_open += change
        self._changed_s = time.monotonic()

    async def wait_until_quiet(self, quiet_s: float, max_s: float) -> None:
        """Until no call has gone on, begun or ended for a while."""
        end_s = time.monotonic() + max_s
        while (now_s := time.monotonic()) < end_s:
            if not self._num_open and now_s - self._changed_s > quiet_s:
                return
            await asyncio.sleep(quiet_s / 4)


def _record(origin: Origin) -> Record:
    return Record(
        origin.method,
        origin.caller.name,
        origin.request_id,
        frontend=origin.frontend,
        trace_headers=origin.trace_headers,
    )


def _note_error(record: Record, error: RequestError) -> None:
    record.outcome = status_name(error)
    if isinstance(error, InvalidFieldError):
        record.bad_field = error.field


def _is_past(deadline_s: float | None, arrived_s: float) -> bool:
    """Whether a call that its client gave up had reached its deadline.

    gRPC rounds a timeout up by one in a hundred at most before it sends it, so a client's own
    deadline comes a little before the one that the server is told.
    """
    if deadline_s is None:
        return False
    left_s, whole_s = deadline_s - time.monotonic(), deadline_s - arrived_s
    return left_s <= ROUNDING * whole_s + SLACK_S
