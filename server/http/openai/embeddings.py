"""`/v1/embeddings`: vectors of texts in OpenAI's shape.

Knows: its JSON, generation.proto. Does not know: how vectors are made.
"""

import base64
from functools import partial
from typing import Any

import numpy as np

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError, RequestError
from quill.server.http.openai.models import MODEL, check_model
from quill.server.http.openai.prompts import PROMPTS, Prompt
from quill.server.http.wire.exchange import Exchange
from quill.server.http.wire.route import Route
from quill.server.service.call import MAX_INLINE_VECTORS
from quill.server.service.generation_options import fill
from quill.server.service.json_fields import INTEGER, STRING, Field, Json, Kind
from quill.server.service.origin import Origin

_FORMATS = ("float", "base64")


def _format(name: str, value: Any) -> str:
    if STRING.read(name, value) not in _FORMATS:
        raise InvalidFieldError(name, f"isn't known; there are {', '.join(_FORMATS)}")
    return str(value)


class Embeddings(Route):
    path = "/v1/embeddings"
    says = "vectors of texts"
    fields = (
        Field("input", PROMPTS, "a text or token ids, or a list of such", is_required=True),
        MODEL,
        Field("encoding_format", Kind(STRING.schema | {"enum": list(_FORMATS)}, _format),
              "how vectors are written: numbers, or 32-bit floats in base64"),
        Field("dimensions", INTEGER, "only the first so many numbers", "dimensions"),
    )  # fmt: skip

    def as_written(self, error: RequestError, values: Json) -> RequestError:
        if isinstance(error, InvalidFieldError) and error.field.startswith("inputs"):
            place = error.field.removeprefix("inputs").partition(".")[0]
            return InvalidFieldError(f"input{place}", error.reason)
        return super().as_written(error, values)

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        async with self._service.call(origin) as call:
            check_model(values, call.served)
            message = pb.EmbedRequest(inputs=map(_input, values["input"]))
            fill(message, values, self.fields)
            response = await call.embed(message)
            is_base64 = values.get("encoding_format") == "base64"
            whole = partial(_whole, response, is_base64)
            if len(response.embeddings) > MAX_INLINE_VECTORS:
                await exchange.answer_long(whole)
            else:
                await exchange.answer_json(whole())


def _input(prompt: Prompt) -> pb.EmbedInput:
    if isinstance(prompt, str):
        return pb.EmbedInput(text=prompt)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=prompt))


def _whole(response: pb.EmbedResponse, is_base64: bool) -> Json:
    write = _base64 if is_base64 else _numbers
    num_tokens = response.usage.prompt_tokens
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(each)}
            for index, each in enumerate(response.embeddings)
        ],
        "model": response.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _numbers(embedding: pb.Embedding) -> list[float]:
    return list(embedding.values)


def _base64(embedding: pb.Embedding) -> str:
    return base64.b64encode(np.array(embedding.values, "<f4").tobytes()).decode()
