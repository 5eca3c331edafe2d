"""A request that was read from a line, as the client's own calls take it.

Knows: generation.proto, the client's calls. Does not know: lines, which server.
"""

from collections.abc import Mapping
from typing import Any, cast

from google.protobuf.message import Message

from quill.protos import generation_pb2 as pb
from quill.server.client.async_client import AsyncClient
from quill.server.client.requests import EmbedOptions, Options, Prompt

_INPUTS = ("prompt", "prompt_ids", "messages", "inputs")


async def generate(
    client: AsyncClient, request: pb.GenerateRequest, timeout_s: float | None
) -> pb.GenerateResponse:
    options = cast("Options", _fields(request))
    return await client.generate(_prompt(request), timeout_s=timeout_s, **options)


async def embed(
    client: AsyncClient, request: pb.EmbedRequest, timeout_s: float | None
) -> pb.EmbedResponse:
    options = cast("EmbedOptions", _fields(request))
    if request.pooling:
        options["pooling"] = pb.Pooling.Name(request.pooling).removeprefix("POOLING_")
    return await client.embed(list(request.inputs), timeout_s=timeout_s, **options)


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "messages":
            return [_fields(each) for each in request.messages.messages]
        case "prompt_ids":
            return list(request.prompt_ids.ids)
    return request.prompt


def _fields(message: Message) -> Mapping[str, Any]:
    """What is set of it, but for what is asked."""
    return {field.name: value for field, value in message.ListFields() if field.name not in _INPUTS}
