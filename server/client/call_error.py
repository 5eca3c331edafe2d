"""What a failed call tells its caller: the status, the reason, and the details of it.

Knows: gRPC's errors and their rich details. Does not know: when to try again.
"""

from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

from quill.protos import error_details_pb2 as details_pb
from quill.server.client.access import Access
from quill.server.client.connection_errors import diagnose
from quill.server.errors import ServerError

_STATUS_KEY = "grpc-status-details-bin"
# What a call ends with if its server dies, beside UNAVAILABLE: proxies reset the stream, or end it
# without a status. They are also what gRPC says for a server with too many calls that it hasn't
# looked at.
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class CallError(ServerError):
    """A call that failed. `code` names a gRPC status; `field` is set if the request is wrong.

    `request_id`: under which the server's log tells more; None if the server didn't say this.
    `is_lasting`: asked again as it is, it would fail again.
    `is_broken`: it ended on its way. What answered is gone, and another may answer.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        *,
        is_lasting: bool = False,
        is_broken: bool = False,
    ) -> None:
        super().__init__(f"{message} ({code.name})")
        self.code = code
        self.reason = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.is_lasting = is_lasting
        self.is_broken = is_broken


def read_error(error: grpc.RpcError, access: Access) -> CallError:
    """What the server said, with the details that it gave; or why there is none.

    Not for calls that were cancelled here: such a CANCELLED would be taken for a server's death.
    """
    call: Any = error  # every RpcError that a call raises is a Call too, which no type says
    code, reason = call.code(), call.details() or "no reason was given"
    if code is grpc.StatusCode.UNAVAILABLE and (found := diagnose(reason, access)):
        return CallError(code, found.reason, is_lasting=found.is_lasting)
    details = _read_details(call.trailing_metadata())
    if code in _BROKEN and details.request_id is None:
        # To callers CANCELLED means that they did it.
        code = grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.CANCELLED else code
        return CallError(code, f"the call broke on its way: {reason}", is_broken=True)
    return CallError(code, reason, *details)


class _Details(NamedTuple):
    """None for what isn't said."""

    field: str | None = None  # that is wrong
    retry_after_s: float | None = None
    request_id: str | None = None


def _read_details(metadata: Any) -> _Details:
    found = _Details()
    packed = next((value for key, value in metadata or () if key == _STATUS_KEY), b"")
    try:
        for detail in details_pb.ErrorStatus.FromString(packed).details:
            found = found._replace(**_read_detail(detail))
    except DecodeError:
        pass  # a proxy's own, perhaps: the status and the reason are known without it
    return found


def _read_detail(detail: any_pb2.Any) -> dict[str, Any]:
    match detail.type_url.rpartition("/")[2]:
        case "google.rpc.BadRequest":
            violations = details_pb.BadRequest.FromString(detail.value).field_violations
            return {"field": violations[0].field} if violations else {}
        case "google.rpc.RetryInfo":
            delay = details_pb.RetryInfo.FromString(detail.value).retry_delay
            return {"retry_after_s": delay.ToNanoseconds() / 1e9}
        case "google.rpc.RequestInfo":
            return {"request_id": details_pb.RequestInfo.FromString(detail.value).request_id}
    return {}
