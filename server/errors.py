"""The server's errors, and the gRPC status of each.

Knows: the one tree of errors, the one table to status codes, the reasons of rejections.
Does not know: gRPC itself; the servicer turns the names into codes.

Every message says what was given, what is allowed, and what to do. It reaches the client as it
is, so it never quotes a prompt.
"""

from typing import Any, Literal, get_args

# Why a call was rejected before the engine worked for it, as the log and the metrics name it.
RejectionReason = Literal[
    "queue_full",
    "key_queue_share",  # the key has its share of the queue waiting
    "key_requests_per_minute",
    "key_tokens_per_minute",
    "key_max_concurrent",
    "deadline_too_short",  # the queue is longer
    "deadline_passed",
    "loading",
    "stopping",
    "unauthenticated",
    "key_revoked",
    "forbidden",
    "invalid_argument",  # the log's bad_field names the field
    "unsupported",
    "grammar_queue_full",
    "unread",  # calls come faster than the server can start them
]
REJECTION_REASONS: tuple[RejectionReason, ...] = get_args(RejectionReason)


class ServerError(Exception):
    """The root of the server's errors. `quill` prints it and exits with `exit_code`."""

    exit_code = 1


class StartError(ServerError):
    """The server can't start: too little memory, no such device, a bundle it can't serve."""


class RequestError(ServerError):
    """One request ended without an answer. All others go on."""

    def __init__(self, message: str, rejection: RejectionReason | None = None) -> None:
        """`rejection`: where the kind of error doesn't say why; None: see `rejection_of`."""
        super().__init__(message)
        self.rejection = rejection


class InvalidFieldError(RequestError):
    """A field of the request that breaks a rule. `field` is its name in generation.proto."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}")
        self.field = field
        self.reason = reason


class NotFoundError(RequestError):
    """A model by a name that nothing here has."""


class UnsupportedError(RequestError):
    """Something that this bundle can't do, whatever the fields say."""


class UnimplementedError(RequestError):
    """A call that this server, or this kind of model, doesn't offer at all."""


class OverloadedError(RequestError):
    """The queue is full, or so long that the deadline can't be met."""

    def __init__(
        self, reason: str, retry_after_s: float, rejection: RejectionReason | None = "queue_full"
    ) -> None:
        super().__init__(reason, rejection)
        self.retry_after_s = retry_after_s


class QuotaError(OverloadedError):
    """The caller's own limits are reached. Others are served."""


class UnauthenticatedError(RequestError):
    """No API key, or one that isn't known."""


class RevokedError(RequestError):
    """An API key that was good once."""


class ForbiddenError(RequestError):
    """A good API key that may not do this."""


class ReloadError(RequestError):
    """A new bundle that can't serve. The old one goes on."""


class DeadlineError(RequestError):
    """The deadline passed before there was anything to send."""


class CancelledError(RequestError):
    """The client left before there was anything to send."""


class SlowReaderError(RequestError):
    """The client stopped reading, and its buffer is full."""


class UnavailableError(RequestError):
    """The server is loading, stopping or broken. Another one, or this one later, may answer."""


class StepError(RequestError):
    """A step failed: a bug of Quill, or of ONNX Runtime. The log has the traceback."""


STATUS: dict[type[RequestError], str] = {
    InvalidFieldError: "INVALID_ARGUMENT",
    NotFoundError: "NOT_FOUND",
    UnsupportedError: "FAILED_PRECONDITION",
    UnimplementedError: "UNIMPLEMENTED",
    OverloadedError: "RESOURCE_EXHAUSTED",
    QuotaError: "RESOURCE_EXHAUSTED",
    UnauthenticatedError: "UNAUTHENTICATED",
    RevokedError: "PERMISSION_DENIED",
    ForbiddenError: "PERMISSION_DENIED",
    ReloadError: "FAILED_PRECONDITION",
    DeadlineError: "DEADLINE_EXCEEDED",
    CancelledError: "CANCELLED",
    SlowReaderError: "ABORTED",
    UnavailableError: "UNAVAILABLE",
    StepError: "INTERNAL",
}
_REJECTION: dict[type[RequestError], RejectionReason] = {
    InvalidFieldError: "invalid_argument",
    NotFoundError: "invalid_argument",
    UnsupportedError: "unsupported",
    UnimplementedError: "unsupported",
    UnauthenticatedError: "unauthenticated",
    RevokedError: "key_revoked",
    ForbiddenError: "forbidden",
}


def status_name(error: RequestError) -> str:
    """The name of the `grpc.StatusCode` that this error ends a call with."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def rejection_of(error: RequestError) -> RejectionReason | None:
    """None: the call wasn't rejected; it failed later."""
    if error.rejection is not None:
        return error.rejection
    return next((_REJECTION[kind] for kind in type(error).__mro__ if kind in _REJECTION), None)


PlainError = tuple[str, str, dict[str, Any]]  # its class, its text, its fields


def plain_error(error: RequestError) -> PlainError:
    """For another process."""
    return type(error).__name__, str(error), vars(error)


def read_error(plain: PlainError) -> RequestError:
    name, message, fields = plain
    error: RequestError = globals()[name].__new__(globals()[name])
    error.args = (message,)
    vars(error).update(fields)
    return error
