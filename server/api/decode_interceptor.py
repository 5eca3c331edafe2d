"""Messages that can't be read are the client's fault, and are told so.

Knows: how gRPC hands messages to a servicer. Does not know: what they mean.

Left to itself grpc.aio logs a traceback for bytes that are no message, and answers UNKNOWN.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quill.server.api.answering import answering, frontend_of
from quill.server.errors import InvalidFieldError
from quill.server.service.calls import Calls
from quill.server.service.origin import Frontend, Origin

_Behaviour = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class _Unreadable:
    reason: str

    def error(self) -> InvalidFieldError:
        return InvalidFieldError("message", f"can't be read: {self.reason}")


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT for some services; the others are left as they are."""

    def __init__(self, services: Collection[str], calls: Calls) -> None:
        self._services = services
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        _, service, method = str(handler_call_details.method).split("/", 2)
        if handler is None or service not in self._services:
            return handler
        frontend = frontend_of(str(handler_call_details.method))
        if handler.request_streaming:
            make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
            behaviour = self._refusing_parts(Origin(method=method, frontend=frontend), behaviour)
        elif handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
            behaviour = self._refusing(method, frontend, handler.unary_stream)
        else:
            make = grpc.unary_unary_rpc_method_handler
            behaviour = self._refusing(method, frontend, handler.unary_unary)
        return make(
            behaviour,
            request_deserializer=_forgiving(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _refusing(self, method: str, frontend: Frontend, behaviour: _Behaviour) -> _Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            if not isinstance(request, _Unreadable):
                return await behaviour(request, context)
            async with answering(method, context, frontend) as origin, self._calls.call(origin):
                raise request.error()

        return answer

    def _refusing_parts(self, origin: Origin, behaviour: _Behaviour) -> _Behaviour:
        """One that can't be read ends the stream: where the next one begins is known, but who
        sends such things needn't be heard out."""

        async def readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, _Unreadable):
                    error = request.error()
                    self._calls.refuse(origin, error)
                    raise error
                yield request

        async def answer(requests: Any, context: Any) -> Any:
            return await behaviour(readable(requests), context)

        return answer


def _forgiving(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(message: bytes) -> Any:
        try:
            return deserialize(message)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read
