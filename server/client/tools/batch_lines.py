"""The lines of a batch: requests in JSON, and the lines that answer them.

Knows: JSON, generation.proto's names, the format of OpenAI's batch files. Does not know: files,
servers.

A line has `prompt` (a text or token ids), `messages` or `input` (what to embed), options by
generation.proto's names, and any `id`, which is repeated in the answer. A line of OpenAI's files is
{"custom_id", "method", "url", "body"}, and its answer {"custom_id", "response", "error"}.

The same request has an answer with the same bytes: what differs from run to run is left out, that
is times, request ids, and tokens saved by prefix caching and speculative decoding.
"""

import hashlib
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.client.errors import CallError
from quill.server.errors import InvalidFieldError
from quill.server.fields import POOLING

Json = dict[str, Any]
Request = pb.GenerateRequest | pb.EmbedRequest
Response = pb.GenerateResponse | pb.EmbedResponse

SEED_BITS = 53  # as many as every reader of JSON keeps
ERROR = b', "error": '  # follows the head of a line that failed
_INPUTS = ("prompt", "messages", "input")
_PROTO_INPUTS = ("prompt", "prompt_ids", "messages", "inputs")
_GENERATE_PATHS = ("/v1/chat/completions", "/v1/completions")
PATHS = (*_GENERATE_PATHS, "/v1/embeddings")
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True)
class Answer:
    """`num_tokens`: generated, or of the prompt for embeddings."""

    line: bytes
    is_error: bool = False
    num_tokens: int = 0


def read_object(line: bytes) -> Json:
    try:
        found = json.loads(line.decode(), parse_constant=_reject_constant)
    except UnicodeDecodeError:
        raise InvalidFieldError("line", "isn't UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("line", f"isn't JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidFieldError("line", 'isn\'t a JSON object, such as {"prompt": "Once"}')
    return found


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def read_request(found: Json, seed: int) -> Request:
    """`seed`: for a line that has none of its own."""
    options = {name: value for name, value in found.items() if name != "id" and value is not None}
    given = [name for name in _INPUTS if name in options]
    if len(given) != 1:
        rule = "it must have one of prompt, messages and input"
        raise InvalidFieldError("line", f"has {' and '.join(given) or 'no input'}; {rule}")
    value = options.pop(given[0])
    if given == ["input"]:
        return _read_embed(value, options)
    request = pb.GenerateRequest()
    _parse(request, {**_prompt(value), **options})
    if not request.HasField("seed"):
        request.seed = seed
    return request


def _prompt(value: Any) -> Json:
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return {"messages": {"messages": value}}
    if _is_ids(value):
        return {"prompt_ids": {"ids": value}}
    rule = "it must be a text, token ids, or messages with role and content"
    raise InvalidFieldError("prompt", f"isn't one; {rule}")


def _read_embed(value: Any, options: Json) -> pb.EmbedRequest:
    several = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(several, list) or not several:
        raise InvalidFieldError("input", "must be a text, token ids, or a list of such")
    if "pooling" in options:
        if options["pooling"] not in POOLING.values:
            rule = f"it must be {' or '.join(POOLING.values)}"
            raise InvalidFieldError("pooling", f"isn't known; {rule}")
        options["pooling"] = POOLING.proto_name(options["pooling"])
    request = pb.EmbedRequest()
    _parse(request, {"inputs": [_embed_input(each) for each in several], **options})
    return request


def _embed_input(value: Any) -> Json:
    if isinstance(value, str):
        return {"text": value}
    if _is_ids(value):
        return {"token_ids": {"ids": value}}
    raise InvalidFieldError("input", "has an entry that is neither a text nor token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _parse(request: Message, fields: Json) -> None:
    """By protobuf's own rules for JSON. The input comes first."""
    names = [field.name for field in request.DESCRIPTOR.fields if field.name not in _PROTO_INPUTS]
    for number, (name, value) in enumerate(fields.items()):
        if number and name not in names:
            raise InvalidFieldError(name, f"isn't known; there are {', '.join(names)}")
        try:
            ParseDict({name: value}, request)
        except (ParseError, ValueError, TypeError, AttributeError) as error:
            raise InvalidFieldError(name, f"can't be read: {error}") from None


def read_http_request(found: Json, seed: int) -> tuple[str, Json]:
    """Path and body of a line of OpenAI's files. `seed`: for a body that has none of its own."""
    path, body = found.get("url"), found.get("body")
    if found.get("method", "POST") != "POST":
        raise InvalidFieldError("method", "must be POST")
    if path not in PATHS:
        raise InvalidFieldError("url", f"isn't known; there are {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise InvalidFieldError("body", "must be an object")
    if body.get("stream"):
        raise InvalidFieldError("body.stream", "is true; a batch has whole answers. Leave it out")
    if path in _GENERATE_PATHS and body.get("seed") is None:
        body = body | {"seed": seed}
    return path, body


def write_answer(head: Json, response: Response, tail: Json) -> Answer:
    """`head` and `tail`: the fields before and after the answer."""
    answer = MessageToDict(response, preserving_proto_field_name=True)
    for name in ("timings", "request_id"):
        answer.pop(name, None)
    counts = {name: getattr(response.usage, name) for name in ("prompt_tokens", "generated_tokens")}
    is_generated = isinstance(response, pb.GenerateResponse)
    for sequence in answer.get("sequences", []):
        sequence.setdefault("text", "")  # protobuf leaves out what is empty
    num_tokens = counts["generated_tokens" if is_generated else "prompt_tokens"]
    return Answer(_write(head | {"answer": answer | {"usage": counts}} | tail), False, num_tokens)


def write_reply(head: Json, status: int, body: Json, name: str, tail: Json) -> Answer:
    """In the format of OpenAI's files, in which the server's errors are responses, too."""
    response = {"status_code": status, "request_id": name, "body": _stable(body, name)}
    content = {"id": f"batch_req_{name}", **tail, "response": response}
    if status != HTTPStatus.OK:
        return Answer(_write(head | {"error": None} | content), True)
    usage = body.get("usage", {})
    num_tokens = usage.get("completion_tokens", usage.get("prompt_tokens", 0))
    return Answer(_write(head | content | {"error": None}), False, num_tokens)


def _stable(body: Json, name: str) -> Json:
    """Without what differs from run to run; ids are replaced by `name`."""
    body = {key: value for key, value in body.items() if key != "timings"}
    if "id" in body:
        body["id"] = f"{str(body['id']).partition('-')[0]}-{name}"
    if "created" in body:
        body["created"] = 0
    if isinstance(body.get("usage"), dict):
        usage = body["usage"].items()
        body["usage"] = {key: n for key, n in usage if key != "prompt_tokens_details"}
    return body


def write_error(head: Json, error: CallError | InvalidFieldError, tail: Json) -> Answer:
    if isinstance(error, CallError):
        code, reason = error.code.name, error.reason
    else:
        code, reason = "INVALID_ARGUMENT", str(error)
    content = {"code": code, "field": error.field, "message": reason}
    return Answer(_write(head | {"error": content} | tail), True)


def _write(content: Json) -> bytes:
    # Half a surrogate, which an id may have, becomes the escape that JSON has for it.
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def derived_seed(*parts: object) -> int:
    """The same parts give the same seed."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def line_digest(text: bytes, *rest: str) -> str:
    whole = b"\0".join([text.strip(), *(each.encode() for each in rest)])
    return hashlib.sha256(whole).hexdigest()[:_DIGEST_CHARACTERS]
