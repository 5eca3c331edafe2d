"""A call as gRPC knows it: where it comes from, and how it is told what went wrong.

Knows: grpc.aio's contexts. Does not know: what calls do.
"""

import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc

from quill.server.api.status import grpc_status
from quill.server.auth.caller import ANYBODY, CALLER, Caller, certified_caller
from quill.server.errors import RequestError
from quill.server.service.calls import raising_context
from quill.server.service.origin import Door, Origin
from quill.server.telemetry.tracing import HEADERS

Context = grpc.aio.ServicerContext[Any, Any]


@raising_context
async def answering(method: str, context: Context, door: Door = "grpc") -> AsyncIterator[Origin]:
    """Whatever its body refuses ends the call with a status."""
    origin = origin_of(method, context, door)
    try:
        yield origin
    except RequestError as error:
        await context.abort_with_status(grpc_status(error, origin.request_id))


def origin_of(method: str, context: Context, door: Door = "grpc") -> Origin:
    left_s = cast("float | None", context.time_remaining())  # the stub forgets None
    metadata = context.invocation_metadata() or ()
    return Origin(
        method=method,
        door=door,
        caller=caller_of(context),
        deadline_s=None if left_s is None else time.monotonic() + left_s,
        trace_headers={name: str(value) for name, value in metadata if name in HEADERS},
    )


def caller_of(context: Context) -> Caller:
    """By its API key; without those, by its certificate, if it had to show one."""
    caller, identities = CALLER.get(), context.peer_identities()
    if caller is ANYBODY and identities:
        return certified_caller(each.decode("utf-8", "replace") for each in identities)
    return caller
