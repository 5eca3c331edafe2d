"""A call as gRPC knows it: where it comes from, and how it is told what went wrong.

Knows: grpc.aio's contexts. Does not know: what calls do.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from quill.protos import kserve_pb2 as kserve
from quill.server.api.status import grpc_status
from quill.server.auth.caller import ANYBODY, CALLER, Caller, certified_caller
from quill.server.errors import RequestError, SlowReaderError
from quill.server.load_header import wants_load, write_load
from quill.server.service.calls import raising_context
from quill.server.service.origin import Frontend, Origin
from quill.server.telemetry.tracing import HEADERS

KSERVE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


def frontend_of(method: str) -> Frontend:
    """By a method's whole name: two doors share a port."""
    return "kserve" if method.startswith(f"/{KSERVE}/") else "grpc"


@raising_context
async def answering(
    method: str, context: Context, frontend: Frontend = "grpc"
) -> AsyncIterator[Origin]:
    """Whatever its body refuses ends the call with a status."""
    origin = origin_of(method, context, frontend)
    try:
        yield origin
    except RequestError as error:
        await context.abort_with_status(grpc_status(error, origin.request_id))


@raising_context
async def telling_load(
    method: str, context: Context, num_requests: Callable[[], int], timeout_s: float
) -> AsyncIterator[Origin]:
    """The same, and a client that wants to know hears how much there is to do: when its request is
    taken in, which is before its first token, and at its end. Who is refused hears only that:
    headers would keep gRPC's own retries from trying again."""

    async def tell() -> None:
        headers = write_load(num_requests())
        await _sent(context.send_initial_metadata(headers), timeout_s)

    async with answering(method, context) as origin:
        if not wants_load(context.invocation_metadata()):
            yield origin
            return
        yield replace(origin, note_taken_in=tell)
        context.set_trailing_metadata(write_load(num_requests()))


async def write(message: Message, context: Context, timeout_s: float) -> None:
    """To whoever reads. Who doesn't, is told so and keeps nobody waiting."""
    await _sent(context.write(message), timeout_s)


async def _sent(sending: Awaitable[None], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await sending
    except TimeoutError:
        raise SlowReaderError(f"nothing was read for {timeout_s:g} s") from None
    except grpc.aio.InternalError as error:
        # The connection broke under the write: there is nobody left to be told.
        raise asyncio.CancelledError from error


def origin_of(method: str, context: Context, frontend: Frontend = "grpc") -> Origin:
    left_s = cast("float | None", context.time_remaining())  # the stub forgets None
    metadata = context.invocation_metadata() or ()
    return Origin(
        method=method,
        frontend=frontend,
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
