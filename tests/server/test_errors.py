"""One tree of errors, one table to status codes."""

import grpc

from quill.server.errors import STATUS, OverloadedError, RequestError, status_name


def _below(kind: type[RequestError]) -> set[type[RequestError]]:
    return {each for child in kind.__subclasses__() for each in (child, *_below(child))}


def test_every_kind_of_request_error_has_a_status_that_grpc_knows() -> None:
    kinds = _below(RequestError)
    assert set(STATUS) == {each for each in kinds if each.__module__ == RequestError.__module__}
    assert all(set(STATUS) & set(each.__mro__) for each in kinds), "a door's own are kinds of these"
    assert set(STATUS.values()) <= set(grpc.StatusCode.__members__)


def test_overload_says_when_to_come_back() -> None:
    error = OverloadedError("the queue is full", retry_after_s=1.5)
    assert status_name(error) == "RESOURCE_EXHAUSTED"
    assert error.retry_after_s == 1.5
