"""The line that answers a line: the same bytes whenever the same is asked.

Knows: JSON, generation.proto. Does not know: files, servers.

What differs from run to run isn't in it: times, the server's name for the request, and what its
caches and guesses saved.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from google.protobuf.json_format import MessageToDict

from quill.protos import generation_pb2 as pb
from quill.server.client.batch.line import Json
from quill.server.client.batch.posting import Reply, lasting
from quill.server.client.errors import CallError
from quill.server.errors import InvalidFieldError

Response = pb.GenerateResponse | pb.EmbedResponse
_CHANGING = ("timings", "request_id")
_COUNTED = ("prompt_tokens", "generated_tokens")
ERROR = b', "error": '  # what follows the head of a line that failed


@dataclass(frozen=True)
class Answer:
    """`line`: as it is written. `num_tokens`: made, or read for vectors."""

    line: bytes
    is_error: bool = False
    num_tokens: int = 0


def write_answer(head: Json, response: Response, tail: Json) -> Answer:
    """`head` and `tail` are around what is told."""
    told = MessageToDict(response, preserving_proto_field_name=True)
    for name in _CHANGING:
        told.pop(name, None)
    usage = {name: getattr(response.usage, name) for name in _COUNTED}
    if isinstance(response, pb.GenerateResponse):
        for sequence in told.get("sequences", []):
            sequence.setdefault("text", "")  # protobuf leaves out what is empty
        num_tokens = usage["generated_tokens"]
    else:
        num_tokens = usage["prompt_tokens"]
    return Answer(_write(head | {"answer": told | {"usage": usage}} | tail), False, num_tokens)


def write_reply(head: Json, reply: Reply, name: str, tail: Json) -> Answer:
    """In the form of OpenAI's files, whose refusals are responses, too."""
    response = {"status_code": reply.status, "request_id": name, "body": lasting(reply, name)}
    content = {"id": f"batch_req_{name}", **tail, "response": response}
    if reply.status != HTTPStatus.OK:
        return Answer(_write(head | {"error": None} | content), True)
    usage = reply.body.get("usage", {})
    num_tokens = usage.get("completion_tokens", usage.get("prompt_tokens", 0))
    return Answer(_write(head | content | {"error": None}), False, num_tokens)


def write_error(head: Json, error: CallError | InvalidFieldError, tail: Json) -> Answer:
    if isinstance(error, CallError):
        code, reason = error.code.name, error.reason
    else:
        code, reason = "INVALID_ARGUMENT", str(error)
    told = {"code": code, "field": error.field, "message": reason}
    return Answer(_write(head | {"error": told} | tail), True)


def _write(content: dict[str, Any]) -> bytes:
    # Half a surrogate, which an id may have, becomes the escape that JSON has for it.
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
