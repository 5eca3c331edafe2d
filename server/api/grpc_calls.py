"""A gRPC call: its API key is checked, its messages are decoded, an error becomes its status.

Knows: grpc.aio's interceptors and contexts, google.rpc's error details. Does not know: what calls
do, quotas.

Left to itself grpc.aio logs a traceback for bytes that are no message, and answers UNKNOWN.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.api import accept_probe
from quill.server.api.accepting import HEALTH
from quill.server.auth.caller import ANYBODY, Caller, certified_caller
from quill.server.auth.failed_attempts import FailedAttempts
from quill.server.auth.key_file import Keyring
from quill.server.balancing_headers import wants_load, write_load
from quill.server.errors import (
    DeadlineError,
    InvalidFieldError,
    OverloadedError,
    RequestError,
    SlowReaderError,
    status_name,
)
from quill.server.frontend.call import Calls, Frontend, RequestContext, raising_context
from quill.server.telemetry.call_record import OPERATIONS
from quill.server.telemetry.tracing import HEADERS

KSERVE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
LATE_RETRY_S = 1.0
REFLECTION = "/grpc.reflection."
_DESCRIPTORS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb.DESCRIPTOR, kserve.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
_METHODS = {path: method.name for path, method in _DESCRIPTORS.items()}
# Whose call is one request for the engine; in a stream of requests each is admitted by itself.
_QUEUED = frozenset(
    path
    for path, method in _DESCRIPTORS.items()
    if method.name in OPERATIONS and not method.client_streaming
)
_Behavior = Callable[[Any, Any], Awaitable[Any]]
Context = grpc.aio.ServicerContext[Any, Any]  # a CallerContext, where our interceptor made it


class CallerContext:
    """grpc.aio's context of one call, with the caller whom the interceptor identified, and the
    call's place in the engine's queue."""

    place: str | None = None

    def __init__(self, context: Any, caller: Caller | None) -> None:
        self._context = context
        self.caller = _certified(context) if caller is None else caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _certified(context: Any) -> Caller:
    """Without API keys: by the client's certificate, if the server asked for one."""
    names = context.peer_identities()
    if not names:
        return ANYBODY
    return certified_caller(each.decode("utf-8", "replace") for each in names)


def frontend_of(method: str) -> Frontend:
    """By a method's whole name: two frontends share a port."""
    return "kserve" if method.startswith(f"/{KSERVE}/") else "grpc"


def request_context(method: str, context: Context, frontend: Frontend = "grpc") -> RequestContext:
    left_s = cast("float | None", context.time_remaining())  # the stub forgets None
    metadata = context.invocation_metadata() or ()
    return RequestContext(
        method=method,
        frontend=frontend,
        caller=cast("CallerContext", context).caller,
        place=cast("CallerContext", context).place,
        deadline_s=None if left_s is None else time.monotonic() + left_s,
        trace_headers=_traced(metadata),
    )


def _traced(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {name: str(value) for name, value in metadata if name in HEADERS}


@raising_context
async def answering(
    method: str, context: Context, frontend: Frontend = "grpc"
) -> AsyncIterator[RequestContext]:
    """Whatever RequestError its body raises ends the call with a status."""
    call = request_context(method, context, frontend)
    try:
        yield call
    except RequestError as error:
        await context.abort_with_status(grpc_status(error, call.request_id))


@raising_context
async def reporting_load(
    method: str, context: Context, num_requests: Callable[[], int], timeout_s: float
) -> AsyncIterator[RequestContext]:
    """The same; a client that asks for the server's load receives it with the initial metadata,
    once the engine has accepted its request, and with the trailing metadata.

    A rejected call gets no initial metadata: gRPC's own retries would stop at it.
    """

    async def send_load() -> None:
        await _sent(context.send_initial_metadata(write_load(num_requests())), timeout_s)

    async with answering(method, context) as call:
        if not wants_load(context.invocation_metadata()):
            yield call
            return
        yield replace(call, on_accepted=send_load)
        context.set_trailing_metadata(write_load(num_requests()))


async def write(message: Message, context: Context, timeout_s: float) -> None:
    """Ends the call of a client that doesn't read."""
    await _sent(context.write(message), timeout_s)


async def _sent(sending: Awaitable[None], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await sending
    except TimeoutError:
        raise SlowReaderError(f"nothing was read for {timeout_s:g} s") from None
    except grpc.aio.InternalError as error:
        # The connection broke under the write: no client is left that could read a status.
        raise asyncio.CancelledError from error


def grpc_status(error: RequestError, request_id: str) -> grpc.Status:
    """The status that ends a call. Its details have the request's id, as the log has."""
    code = grpc.StatusCode[status_name(error)]
    status = status_pb2.Status(code=code.value[0], message=str(error))
    for detail in _details(error, request_id):
        status.details.add().Pack(detail)
    converted: grpc.Status = rpc_status.to_status(status)
    return converted


def _details(error: RequestError, request_id: str) -> list[Message]:
    details: list[Message] = [error_details_pb2.RequestInfo(request_id=request_id)]
    if isinstance(error, InvalidFieldError):
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(field=error.field, description=str(error))
        details.append(bad_request)
    if isinstance(error, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    return details


class Interceptor(grpc.aio.ServerInterceptor):
    """Health needs no key: orchestrators and load balancers have none.

    `services`: ours, whose methods get a CallerContext.
    """

    def __init__(
        self,
        services: Collection[str],
        calls: Calls,
        keyring: Keyring | None,
        open_reflection: bool,
        probe_secret: str = "",
    ) -> None:
        self._services = services
        self._probe = (accept_probe.HEADER, probe_secret)
        self._failed = FailedAttempts()
        self._calls = calls
        self._keyring = keyring
        self._open = (HEALTH, *([REFLECTION] if open_reflection else []))

    def free(self, place: str | None) -> None:
        self._calls.free(place)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        metadata: Any = handler_call_details.invocation_metadata
        if method == accept_probe.METHOD and self._probe in metadata:
            return grpc.stream_stream_rpc_method_handler(accept_probe.accept)
        try:
            caller = self._identify(method, metadata)
        except RequestError as error:
            return self._rejected(method, metadata, error, ANYBODY)
        handler = await continuation(handler_call_details)
        _, service, _ = method.split("/", 2)
        if handler is None or service not in self._services:
            return handler
        return self._wrapped(handler, method, caller)

    def _identify(self, method: str, metadata: Any) -> Caller | None:
        if self._keyring is None or method.startswith(self._open):
            return None
        keys = [str(value) for name, value in metadata if name == "authorization"]
        return self._keyring.identify(keys)

    def reserve(self, method: str, context: Any) -> tuple[Any, str | None]:
        """What rejects a call for whose request the queue has no place, or the call's place. A
        wrong key's call gets neither: it waits for its turn."""
        metadata = context.invocation_metadata()
        if method not in _QUEUED or self._probe in metadata:
            return None, None
        caller = ANYBODY
        try:
            caller = self._identify(method, metadata) or _certified(context)
            return None, self._calls.reserve(caller)
        except OverloadedError as error:
            return self._rejected(method, metadata, error, caller), None
        except RequestError:
            return None, None

    def reject_late(self, method: str, context: Any) -> Any:
        """A call that waited too long before anything was done for it. None: the server's own.

        One that has expired gets its status, too: gRPC resets a stream that is just dropped, and a
        client whose timer is late would take that for CANCELLED.
        """
        metadata = context.invocation_metadata()
        if self._probe in metadata:
            return None
        left_s = cast("float | None", context.time_remaining())
        if left_s is not None and left_s <= 0:
            error = DeadlineError("the deadline passed before the call was read", "unread")
            return self._rejected(method, metadata, error, ANYBODY)
        reason = "more calls come than the server can start. Try again later"
        late = OverloadedError(reason, LATE_RETRY_S * random.uniform(1, 2), "unread")
        return self._rejected(method, metadata, late, ANYBODY)

    def _rejected(self, method: str, metadata: Any, error: RequestError, caller: Caller) -> Any:
        """As a stream, whatever the method is: so no message is waited for, or decoded."""
        # A name that the caller made up must not become a label of the metrics.
        known, frontend = _METHODS.get(method, "other"), frontend_of(method)
        headers = _traced(metadata)
        call = RequestContext(method=known, frontend=frontend, caller=caller, trace_headers=headers)
        self._calls.reject(call, error)
        status, is_held = (
            grpc_status(error, call.request_id),
            not isinstance(error, OverloadedError | DeadlineError),
        )

        async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
            if is_held:
                await self._failed.hold(host_of(context.peer()))
            # `abort` would leave a reference cycle: the call's state has an error, whose traceback
            # has the state. Of thousands Python's collector stopped the event loop for 70 ms.
            context.set_code(status.code)
            context.set_details(status.details)
            context.set_trailing_metadata(status.trailing_metadata)

        return grpc.stream_stream_rpc_method_handler(answer)

    def _wrapped(self, handler: Any, method: str, caller: Caller | None) -> Any:
        if handler.request_streaming:
            behavior = self._stream(handler, method, caller)
            make: Any = grpc.stream_stream_rpc_method_handler
        else:
            behavior = self._unary(handler, method, caller)
            # As for a stream of requests: grpc.aio's own unary calls end without a status where the
            # client ends its stream without a message.
            make = grpc.stream_unary_rpc_method_handler
            if handler.response_streaming:
                make = grpc.stream_stream_rpc_method_handler
        return make(behavior, response_serializer=handler.response_serializer)

    def _unary(self, handler: Any, method: str, caller: Caller | None) -> _Behavior:
        async def answer(_: AsyncIterator[bytes], context: Any) -> Any:
            ours: Any = CallerContext(context, caller)
            try:
                message = await context.read()
                if message is grpc.aio.EOF:
                    await asyncio.sleep(0)  # a client that has left cancels this task
                request = await self._read(handler, method, message, ours)
                return await (handler.unary_unary or handler.unary_stream)(request, ours)
            except grpc.aio.AbortError as aborted:
                # gRPC raises it once more after this. The call's state has the error, and the
                # error's traceback would have the state: a reference cycle.
                aborted.__traceback__ = aborted.__context__ = None
                return None
            finally:
                self.free(ours.place)

        return answer

    async def _read(self, handler: Any, method: str, message: Any, context: Any) -> Any:
        """The message is there: from now on the call has a place in the queue, if it needs one."""
        try:
            if method in _QUEUED:
                context.place = self._calls.reserve(context.caller)
            return _decoded(handler, message)
        except RequestError as error:
            name = method.rpartition("/")[2]
            async with (
                answering(name, context, frontend_of(method)) as call,
                self._calls.record(call),
            ):
                raise error

    def _stream(self, handler: Any, method: str, caller: Caller | None) -> _Behavior:
        """A message that can't be decoded ends the stream."""
        name, frontend = method.rpartition("/")[2], frontend_of(method)

        async def decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for message in messages:
                try:
                    request = _decoded(handler, message)
                except InvalidFieldError as error:
                    self._calls.reject(RequestContext(method=name, frontend=frontend), error)
                    raise
                yield request

        async def answer(messages: Any, context: Any) -> Any:
            return await handler.stream_stream(decoded(messages), CallerContext(context, caller))

        return answer


def host_of(peer: str) -> str:
    """Of gRPC's name for a peer, such as ipv4:127.0.0.1:4711."""
    return peer.rpartition(":")[0]


def _decoded(handler: Any, message: Any) -> Any:
    if message is grpc.aio.EOF:
        raise InvalidFieldError("message", "is missing: the stream ended before one was sent")
    try:
        return handler.request_deserializer(message)
    except DecodeError as error:
        raise InvalidFieldError("message", f"can't be read: {error}") from None
