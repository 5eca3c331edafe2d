"""What a failed call tells its caller: the status, the reason, and the details that the server gave.

Knows: gRPC's errors and their rich details. Does not know: when to try again.
"""

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quill.server.client.access import Access
from quill.server.client.connection_errors import diagnose
from quill.server.client.requests import _DROPPED
from quill.server.errors import ServerError


class CallError(ServerError):
    """A call that failed. `code` names a gRPC status; `field` is set if the request is wrong.

    `is_lasting`: asked again as it is, it would fail again.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        is_lasting: bool = False,
    ) -> None:
        super().__init__(f"{message} ({code.name})")
        self.code = code
        self.reason = message
        self.is_lasting = is_lasting
        self.field = field
        self.retry_after_s = retry_after_s


def read_error(error: grpc.RpcError, access: Access) -> CallError:
    """What the server said, with the details that it gave; or why there is none."""
    call: Any = error  # every RpcError that a call raises is a Call too, which no type says
    field, retry_after_s = None, None
    status = rpc_status.from_call(_Ended(call.code(), call.details(), call.trailing_metadata()))
    for detail in status.details if status is not None else ():
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    reason = call.details() or "no reason was given"
    if (call.code(), reason) == _DROPPED:
        return CallError(grpc.StatusCode.UNAVAILABLE, "the server dropped the call before it began")
    if call.code() is grpc.StatusCode.UNAVAILABLE and (found := diagnose(reason, access)):
        return CallError(call.code(), found.reason, is_lasting=found.is_lasting)
    return CallError(call.code(), reason, field, retry_after_s)


@dataclass(frozen=True)
class _Ended:
    """The part of a call that rpc_status reads; AioRpcError isn't a Call."""

    _code: grpc.StatusCode
    _details: str
    _metadata: Any

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata
