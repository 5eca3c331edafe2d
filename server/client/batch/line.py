"""One line of a batch: what it asks for, in JSON.

Knows: JSON, generation.proto's names. Does not know: files, servers, answers.

A line has `prompt` (a text or token ids), `messages` or `input` (what to embed), options by
generation.proto's names beside it, and any `id`, which its answer has, too.
"""

import hashlib
import json
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError

Json = dict[str, Any]
Request = pb.GenerateRequest | pb.EmbedRequest

_POOLINGS = {each: f"POOLING_{each.upper()}" for each in ("mean", "first", "last")}
_INPUTS = ("prompt", "messages", "input")
_MESSAGES = ("prompt", "prompt_ids", "messages", "inputs")  # what they become
SEED_BITS = 53  # as many as every reader of JSON keeps


def read_object(line: bytes) -> Json:
    try:
        found = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidFieldError("line", "isn't UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("line", f"isn't JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidFieldError("line", 'isn\'t a JSON object, such as {"prompt": "Once"}')
    return found


def read_request(found: Json, seed: int) -> Request:
    """`seed`: for a line that has none of its own."""
    fields = {name: value for name, value in found.items() if name != "id" and value is not None}
    given = [name for name in _INPUTS if name in fields]
    if len(given) != 1:
        rule = "it must have one of prompt, messages and input"
        raise InvalidFieldError("line", f"has {' and '.join(given) or 'nothing to ask'}; {rule}")
    value = fields.pop(given[0])
    request = _embedding(value, fields) if given == ["input"] else _generation(value, fields)
    if isinstance(request, pb.GenerateRequest) and not request.HasField("seed"):
        request.seed = seed
    return request


def _generation(value: Any, options: Json) -> pb.GenerateRequest:
    if isinstance(value, str):
        asked: Json = {"prompt": value}
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        asked = {"messages": {"messages": value}}
    elif _is_ids(value):
        asked = {"prompt_ids": {"ids": value}}
    else:
        rule = "it must be a text, token ids, or messages with role and content"
        raise InvalidFieldError("prompt", f"is none that can be continued; {rule}")
    request = pb.GenerateRequest()
    _fill(request, options, asked)
    return request


def _embedding(value: Any, options: Json) -> pb.EmbedRequest:
    several = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(several, list) or not several:
        raise InvalidFieldError("input", "must be a text, token ids, or a list of such")
    pooling = options.pop("pooling", None)
    if pooling is not None:
        if not isinstance(pooling, str) or pooling not in _POOLINGS:
            raise InvalidFieldError("pooling", "isn't known; it must be mean, first or last")
        options["pooling"] = _POOLINGS[pooling]
    request = pb.EmbedRequest()
    _fill(request, options, {"inputs": [_embed_input(each) for each in several]})
    return request


def _embed_input(value: Any) -> Json:
    if isinstance(value, str):
        return {"text": value}
    if _is_ids(value):
        return {"token_ids": {"ids": value}}
    raise InvalidFieldError("input", "has an entry that is neither a text nor token ids")


def _fill(request: Message, options: Json, asked: Json) -> None:
    """By protobuf's own rules for JSON."""
    names = [field.name for field in request.DESCRIPTOR.fields if field.name not in _MESSAGES]
    for name in options:
        if name not in names:
            raise InvalidFieldError(name, f"isn't known; there are {', '.join(names)}")
    for name, value in (*asked.items(), *options.items()):
        try:
            ParseDict({name: value}, request)
        except (ParseError, ValueError, TypeError, AttributeError) as error:
            raise InvalidFieldError(name, f"can't be read: {error}") from None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def derived_seed(*parts: object) -> int:
    """The same parts give the same seed."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
