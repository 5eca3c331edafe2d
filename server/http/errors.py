"""Errors over HTTP: status, headers, and a body in OpenAI's shape.

Knows: statuses, headers, the shape of an error. Does not know: when errors happen.
"""

import math
from collections.abc import Sequence

from quill.server.errors import (
    InvalidFieldError,
    OverloadedError,
    QuotaError,
    RequestError,
    status_name,
)
from quill.server.frontend.json_values import Json

STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNIMPLEMENTED": 400,  # of 501 clients would try again
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "DEADLINE_EXCEEDED": 408,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "ABORTED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
Headers = Sequence[tuple[str, str]]


class HttpError(InvalidFieldError):
    """An error of HTTP itself: `field` is the part of the request that is wrong."""

    def __init__(self, status: int, field: str, reason: str, headers: Headers = ()):
        super().__init__(field, reason)
        self.status = status
        self.headers = headers


def status_of(error: RequestError) -> int:
    return error.status if isinstance(error, HttpError) else STATUS[status_name(error)]


def headers_of(error: RequestError) -> Headers:
    if isinstance(error, HttpError):
        return error.headers
    if status_of(error) == 401:
        return [("www-authenticate", "Bearer")]
    if isinstance(error, OverloadedError):
        wait_s = error.retry_after_s
        exact = str(math.ceil(1000 * wait_s))
        return [("retry-after", str(math.ceil(wait_s))), ("retry-after-ms", exact)]
    return []


def body_of(error: RequestError) -> Json:
    status = status_of(error)
    code = "insufficient_quota" if isinstance(error, QuotaError) else status_name(error).lower()
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(status, "invalid_request_error"),
            "param": error.field if isinstance(error, InvalidFieldError) else None,
            "code": code,
        }
    }
