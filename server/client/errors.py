"""What a failed call reports: the status, the reason, its details, and advice on connections.

Knows: gRPC's errors and their rich details, the texts of gRPC's connection errors, the client's
options. Does not know: when a call is retried.

Some causes gRPC reports alike, and the client's options tell them apart: a server that requires TLS
closes the connection of a client without TLS, and a server that requires a client certificate
closes the connection of a client without one, both without a reason.
"""

import asyncio
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

from quill.protos import error_details_pb2 as details_pb
from quill.server.client.access import Access
from quill.server.client.primitives import is_task_canceled
from quill.server.errors import ServerError

_STATUS_KEY = "grpc-status-details-bin"
# Statuses beside UNAVAILABLE that a call ends with if its server dies: proxies reset the stream, or
# end it without a status. gRPC also reports them for a server with too many unaccepted calls.
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class CallError(ServerError):
    """A call that failed. `code` is a gRPC status; `field` is set if the request is wrong.

    `request_id`: the server's log has more under this id; None if the error isn't the server's.
    `is_lasting`: the same call would fail again.
    `is_broken`: the connection or the server died during the call; another server may answer.
    `is_unreached`: no connection was established.
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
        is_unreached: bool = False,
    ) -> None:
        super().__init__(f"{message} ({code.name})")
        self.code = code
        self.reason = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.is_lasting = is_lasting
        self.is_broken = is_broken
        self.is_unreached = is_unreached


def closed() -> CallError:
    return CallError(grpc.StatusCode.CANCELLED, "the client was closed")


def read_failure(
    raised: BaseException, access: Access, *, is_closed: bool, was_reached: bool
) -> CallError:
    """`is_closed`: the client is. The cancellation of the caller's task is raised as it is."""
    if is_closed and not is_task_canceled(raised):
        return closed()
    if isinstance(raised, asyncio.CancelledError):
        raise raised
    return read_error(raised, access, was_reached=was_reached)


def status_code(raised: BaseException) -> grpc.StatusCode:
    """The cancellation of the caller's task is raised as it is."""
    if isinstance(raised, asyncio.CancelledError):
        if is_task_canceled(raised):
            raise raised
        return grpc.StatusCode.CANCELLED
    call: Any = raised
    code: grpc.StatusCode = call.code()
    return code


def read_error(error: BaseException, access: Access, *, was_reached: bool = False) -> CallError:
    """The server's error with its details, or why no server was reached.

    `was_reached`: one was before, with the same options.
    Not for calls that were canceled here: such a CANCELLED would be taken for a server's death.
    """
    call: Any = error  # every RpcError that a call raises is a Call too, which no type says
    code, reason = call.code(), call.details() or "no reason was given"
    if code is grpc.StatusCode.UNAVAILABLE and (
        found := diagnose(reason, access, was_reached=was_reached)
    ):
        return found
    details = _read_details(call.trailing_metadata())
    is_closed = code is grpc.StatusCode.UNAVAILABLE and _is_closed_by_server(reason)
    if (code in _BROKEN or is_closed) and details.request_id is None:
        # To callers CANCELLED means that they did it.
        code = grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.CANCELLED else code
        return CallError(code, f"the connection broke during the call: {reason}", is_broken=True)
    return CallError(code, reason, *details)


class _Details(NamedTuple):
    field: str | None = None  # the wrong one
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


_NO_PEM = "--ca, --cert or --key holds nothing that TLS can use: each must be a PEM file"
_NO_TLS = "the server doesn't use TLS. Leave out --tls, --ca, --cert and --key"
_OTHER_NAME = (
    "the server's certificate is for another name than the one in --address. Use a name that the "
    "certificate has, or make a certificate for this name"
)
_NOT_GRPC = "what listens there isn't a gRPC server. Is it the metrics port?"
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
# Parts of gRPC's texts, and what they mean. These last until an option is changed.
_LASTING = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "Hostname Verification Check failed": _OTHER_NAME,
    "Failed to create security handshaker": _NO_PEM,
    "Failed parsing HTTP/2": _NOT_GRPC,
}


def diagnose(details: str, access: Access, *, was_reached: bool = False) -> CallError | None:
    """Why a connection failed, from gRPC's text. None: the text isn't about a connection.

    `was_reached`: the same options have worked, so no advice is given on them.
    """
    if details.startswith("errors resolving"):
        return _unreached(f"the host name can't be resolved: {details}")
    if not details.startswith("failed to connect"):
        return None
    last = details.partition("last error: ")[2].partition(": ")[2] or details
    if _UNTRUSTED in last:
        return _unreached(_untrusted(last, access), is_lasting=True)
    for part, reason in _LASTING.items():
        if part in last:
            return _unreached(reason, is_lasting=True)
    if _is_closed_by_server(last):
        advice = "" if was_reached else f". {_closed_advice(access)}"
        return _unreached(f"the server closed the connection: {last}{advice}")
    advice = "" if was_reached else ". Is one running? `quill serve` starts it"
    return _unreached(f"no server answers: {last}{advice}")


def _unreached(reason: str, *, is_lasting: bool = False) -> CallError:
    code = grpc.StatusCode.UNAVAILABLE
    return CallError(code, reason, is_lasting=is_lasting, is_unreached=True)


def _is_closed_by_server(text: str) -> bool:
    return "Socket closed" in text or "Connection reset" in text


def _untrusted(last: str, access: Access) -> str:
    why = last.partition(f"{_UNTRUSTED}: ")[2].removesuffix(": OK")
    trusted = "the authority in --ca" if access.ca is not None else "this machine's authorities"
    return (
        f"the server's certificate isn't trusted by {trusted}: {why}. If another authority signed "
        "it, give that one with --ca"
    )


def _closed_advice(access: Access) -> str:
    """A server that requires TLS or a client certificate closes connections without a reason."""
    if not access.uses_tls:
        return "If it requires TLS, give --ca or --tls"
    if access.cert is None:
        return "If it requires a client certificate (--client-ca), give --cert and --key"
    return "Is the certificate in --cert signed by an authority of the server's --client-ca?"
