"""Every call from its beginning to its one end: who makes it, within which limits, how it ended.

Knows: grpc.aio's contexts, callers, quotas, records. Does not know: what calls do.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ParamSpec, TypeVar, cast

import grpc

from quill.server.api.status import grpc_status
from quill.server.auth.caller import ANYBODY, CALLER, Caller
from quill.server.auth.rate_limit import Quotas
from quill.server.errors import InvalidFieldError, RequestError, StepError, status_name
from quill.server.telemetry.call_record import Record
from quill.server.telemetry.tracing import HEADERS

logger = logging.getLogger(__name__)

ROUNDING = 0.01
SLACK_S = 0.01  # clocks are read at different moments

# Names of certificates go into the log, where a line must not be two.
_UNFIT = re.compile(r"[^\w.@,:*/+-]")
MAX_NAME = 200

Context = grpc.aio.ServicerContext[Any, Any]
_Parameters = ParamSpec("_Parameters")
_Value = TypeVar("_Value")


def raising_context(
    make: Callable[_Parameters, AsyncIterator[_Value]],
) -> Callable[_Parameters, AbstractAsyncContextManager[_Value, None]]:
    """An asynccontextmanager that promises to raise where its body raised: aborting a call does.

    So mypy knows that a method whose body returns a response always returns one.
    """
    return cast(
        "Callable[_Parameters, AbstractAsyncContextManager[_Value, None]]",
        asynccontextmanager(make),
    )


class Calls:
    """`report` is told of each call when it has ended."""

    def __init__(self, report: Callable[[Record], None], is_traced: bool = False) -> None:
        self.report = report
        self._is_traced = is_traced
        self.quotas = Quotas()
        self._num_open = 0
        self._changed_s = 0.0  # when a call began or ended

    @raising_context
    async def call(self, method: str, context: Context) -> AsyncIterator[Record]:
        """Every call ends once, with a status of its own, and is accounted for."""
        caller = caller_of(context)
        record, error = Record(method, caller.name), None
        if self._is_traced:
            record.trace_headers = _trace_headers(context)
        self._note(1)
        try:
            with self.quotas.call(caller):
                yield record
        except RequestError as raised:
            error = raised
            record.outcome = status_name(error)
            if isinstance(error, InvalidFieldError):
                record.bad_field = error.field
        except asyncio.CancelledError:
            record.outcome = "CANCELLED"
            if _is_past(context, record.arrived_s):
                record.outcome = "DEADLINE_EXCEEDED"
            raise
        except Exception:
            logger.exception("a bug in %s, request %s", method, record.request_id)
            error = StepError(f"a bug in the server; its log has more under {record.request_id}")
            record.outcome = status_name(error)
        finally:
            self._note(-1)
            record.close()
            self.report(record)
        if error is not None:
            await context.abort_with_status(grpc_status(error, record.request_id))

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


def caller_of(context: Context) -> Caller:
    """By its API key; without those, by its certificate, if it had to show one."""
    caller, identities = CALLER.get(), context.peer_identities()
    if caller is ANYBODY and identities:
        name = b",".join(identities).decode("utf-8", "replace")
        return Caller(name=_UNFIT.sub("_", name)[:MAX_NAME])
    return caller


def _trace_headers(context: Context) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {name: str(value) for name, value in metadata if name in HEADERS}


def _is_past(context: Context, arrived_s: float) -> bool:
    """Whether a call that its client gave up had reached its deadline.

    gRPC rounds a timeout up by one in a hundred at most before it sends it, so a client's own
    deadline comes a little before the one that the server is told.
    """
    left_s = cast("float | None", context.time_remaining())  # the stub forgets None
    if left_s is None:
        return False
    whole_s = time.monotonic() - arrived_s + left_s
    return left_s <= ROUNDING * whole_s + SLACK_S
