"""What a failed call tells its caller: the status, the reason, and the details of it.

Knows: gRPC's errors and their rich details. Does not know: when to try again.
"""

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quill.protos import error_details_pb2 as details_pb
from quill.server.client.access import Access
from quill.server.client.connection_errors import diagnose
from quill.server.errors import ServerError

_STATUS_KEY = "grpc-status-details-bin"
# What gRPC says for a server with too many calls that it hasn't looked at, or one that stops. Who
# cancels a call itself hears other words.
_DROPPED = (grpc.StatusCode.CANCELLED, "CANCELLED")


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
    reason = call.details() or "no reason was given"
    if (call.code(), reason) == _DROPPED:
        return CallError(grpc.StatusCode.UNAVAILABLE, "the server dropped the call before it began")
    if call.code() is grpc.StatusCode.UNAVAILABLE and (found := diagnose(reason, access)):
        return CallError(call.code(), found.reason, is_lasting=found.is_lasting)
    return CallError(call.code(), reason, *_read_details(call.trailing_metadata()))


def _read_details(metadata: Any) -> tuple[str | None, float | None]:
    """The field that is wrong, and in how many seconds to come back; None for what isn't said."""
    field, retry_after_s = None, None
    packed = next((value for key, value in metadata or () if key == _STATUS_KEY), b"")
    try:
        for detail in details_pb.ErrorStatus.FromString(packed).details:
            kind = detail.type_url.rpartition("/")[2]
            if kind == "google.rpc.BadRequest":
                violations = details_pb.BadRequest.FromString(detail.value).field_violations
                field = violations[0].field if violations else field
            elif kind == "google.rpc.RetryInfo":
                delay = details_pb.RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = delay.ToNanoseconds() / 1e9
    except DecodeError:
        pass  # a proxy's own, perhaps: the status and the reason are known without it
    return field, retry_after_s
