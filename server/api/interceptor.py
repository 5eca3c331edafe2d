"""What every gRPC call passes first: its API key is checked, and its messages are decoded.

Knows: grpc.aio's interceptors, which services need no key. Does not know: what calls do, quotas.

Left to itself grpc.aio logs a traceback for bytes that are no message, and answers UNKNOWN.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from quill.protos import generation_pb2 as pb
from quill.protos import kserve_pb2 as kserve
from quill.server.api.grpc_calls import CallerContext, Context, answering, frontend_of, grpc_status
from quill.server.auth.caller import Caller
from quill.server.auth.key_file import Keyring
from quill.server.errors import InvalidFieldError, RequestError
from quill.server.frontend.call import Calls, Frontend, RequestContext

HEALTH = "/grpc.health."
REFLECTION = "/grpc.reflection."
_METHODS = {
    f"/{service.full_name}/{method.name}": method.name
    for file in (pb.DESCRIPTOR, kserve.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
_Behavior = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class _Undecodable:
    reason: str

    def error(self) -> InvalidFieldError:
        return InvalidFieldError("message", f"can't be read: {self.reason}")


class Interceptor(grpc.aio.ServerInterceptor):
    """Health needs no key: orchestrators and load balancers have none.

    `services`: ours, whose methods get a CallerContext. `also_open`: prefixes of other methods that
    need no key.
    """

    def __init__(
        self,
        services: Collection[str],
        calls: Calls,
        keyring: Keyring | None,
        open_reflection: bool,
        also_open: Sequence[str] = (),
    ) -> None:
        self._services = services
        self._calls = calls
        self._keyring = keyring
        self._open = (HEALTH, *([REFLECTION] if open_reflection else []), *also_open)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        caller = None
        if self._keyring is not None and not method.startswith(self._open):
            metadata = handler_call_details.invocation_metadata
            keys = [str(value) for name, value in metadata if name == "authorization"]
            try:
                caller = self._keyring.identify(keys)
            except RequestError as error:
                return self._rejected(method, error)
        handler = await continuation(handler_call_details)
        _, service, name = method.split("/", 2)
        if handler is None or service not in self._services:
            return handler
        return self._wrapped(handler, name, frontend_of(method), caller)

    def _rejected(self, method: str, error: RequestError) -> Any:
        """As a stream, whatever the method is: so no message is waited for."""
        # A name that the caller made up must not become a label of the metrics.
        known = _METHODS.get(method, "other")
        call = RequestContext(method=known, frontend=frontend_of(method))

        async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
            self._calls.reject(call, error)
            await context.abort_with_status(grpc_status(error, call.request_id))

        return grpc.stream_stream_rpc_method_handler(answer)

    def _wrapped(self, handler: Any, name: str, frontend: Frontend, caller: Caller | None) -> Any:
        if handler.request_streaming:
            make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream
            behavior = self._stream(
                RequestContext(method=name, frontend=frontend), behavior, caller
            )
        elif handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
            behavior = self._unary(name, frontend, handler.unary_stream, caller)
        else:
            make = grpc.unary_unary_rpc_method_handler
            behavior = self._unary(name, frontend, handler.unary_unary, caller)
        return make(
            behavior,
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, name: str, frontend: Frontend, behavior: _Behavior, caller: Caller | None
    ) -> _Behavior:
        async def answer(request: Any, context: Any) -> Any:
            ours = cast("Context", CallerContext(context, caller))
            if not isinstance(request, _Undecodable):
                return await behavior(request, ours)
            async with answering(name, ours, frontend) as call, self._calls.record(call):
                raise request.error()

        return answer

    def _stream(
        self, call: RequestContext, behavior: _Behavior, caller: Caller | None
    ) -> _Behavior:
        """A message that can't be decoded ends the stream."""

        async def decodable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, _Undecodable):
                    error = request.error()
                    self._calls.reject(call, error)
                    raise error
                yield request

        async def answer(requests: Any, context: Any) -> Any:
            return await behavior(decodable(requests), CallerContext(context, caller))

        return answer


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(message: bytes) -> Any:
        try:
            return deserialize(message)
        except DecodeError as error:
            return _Undecodable(str(error))

    return read
