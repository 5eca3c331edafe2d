"""Errors as gRPC statuses with rich details.

Knows: google.rpc's messages. Does not know: when errors happen.
"""

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quill.server.errors import InvalidFieldError, OverloadedError, RequestError, status_name


def grpc_status(error: RequestError, request_id: str) -> grpc.Status:
    """What a call ends with. The request's id, which the log has too, is among the details."""
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
