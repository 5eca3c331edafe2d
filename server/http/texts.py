"""What a route is, and `/v1/embeddings`, `/tokenize`, `/detokenize`, `/v1/models`.

Knows: OpenAI's and vLLM's JSON for them. Does not know: how embeddings and tokens are computed.
"""

import base64
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from quill.server.errors import InvalidFieldError
from quill.server.fields import EMBED, Choices
from quill.server.frontend.answer import Chunk, Embeddings, whole_embeddings
from quill.server.frontend.call import (
    MAX_INLINE_EMBEDDINGS,
    MAX_INLINE_TOKENS,
    Call,
    Calls,
    RequestContext,
)
from quill.server.frontend.json_options import (
    CONVERSATION,
    TOOLS,
    choice_kind,
    generate_spec,
    option_fields,
)
from quill.server.frontend.json_values import (
    BOOLEAN,
    INTEGERS,
    STRING,
    Json,
    JsonField,
    Kind,
    Unsupported,
    read_fields,
    wrong_type,
)
from quill.server.frontend.reader import RequestReader
from quill.server.frontend.served_model import ALIAS, ServedModel
from quill.server.frontend.spec import EmbedInput, EmbedSpec, ParsedRequest, Prompt
from quill.server.http.errors import HttpError
from quill.server.http.exchange import Exchange

MODEL = JsonField("model", STRING, f"the name of the model, as /v1/models has it, or {ALIAS}")
STARTED = int(time.time())
MAX_PROMPTS = 2048
MAX_TOKEN_ID = 2**31 - 1
TextOrIds = str | list[int]


class Route:
    """One path. One table of its fields is checked, and shown by `/docs`."""

    verb: ClassVar[Literal["GET", "POST"]] = "POST"
    path: ClassVar[str]
    help: ClassVar[str]
    fields: ClassVar[Sequence[JsonField]] = ()
    unsupported: ClassVar[Sequence[Unsupported]] = ()

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def read(self, body: Any) -> Json:
        """The fields' values, each checked by itself."""
        return read_fields(body, self.fields, self.unsupported)

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        raise NotImplementedError


def check_model(values: Json, served: ServedModel) -> None:
    if values.get("model", ALIAS) not in served.names:
        others = ", ".join(served.names[1:])
        rule = f"there is {served.name}, which {others} means, too"
        raise HttpError(404, "model", f"isn't served here; {rule}")


def _prompts(name: str, value: Any) -> list[TextOrIds]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and not 1 <= len(value) <= MAX_PROMPTS:  # before all are looked at
        rule = f"it must have from 1 to {MAX_PROMPTS}"
        raise InvalidFieldError(name, f"has {len(value)} entries; {rule}")
    is_whole = isinstance(value, list) and all(
        isinstance(each, str) or _is_ids(each) for each in value
    )
    if not is_whole:
        raise wrong_type(name, value, "a string, a list of token ids, or a list of such")
    return list(value)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value)
    )


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
PROMPTS = Kind(
    {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}}]}, _prompts
)


class Models(Route):
    verb = "GET"
    path = "/v1/models"
    help = "the model that is served"

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            entry = {
                "id": call.served.name,
                "object": "model",
                "created": STARTED,
                "owned_by": "quill",
                "max_model_len": call.served.context,
            }
        await exchange.answer_json({"object": "list", "data": [entry]})


class EmbeddingsRoute(Route):
    path = "/v1/embeddings"
    help = "embeddings of texts"
    fields = (
        JsonField("input", PROMPTS, "a text or token ids, or a list of such", is_required=True),
        MODEL,
        JsonField(
            "encoding_format",
            choice_kind(Choices("", ("float", "base64"))),
            "how embeddings are written: numbers, or 32-bit floats in base64",
        ),
        *option_fields(EMBED["dimensions"]),
    )

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            check_model(values, call.served)
            parse = partial(_embed_spec, values)
            embedded = await call.read_only(RequestReader.read_embed, parse, exchange.num_bytes)
            whole = partial(_embeddings_json, *embedded, values, call.served)
            is_long = len(values["input"]) > MAX_INLINE_EMBEDDINGS
            await exchange.answer_made(whole, is_long)


def _embed_spec(values: Json) -> EmbedSpec:
    fields = [f"input[{number}]" for number in range(len(values["input"]))]
    inputs = [
        EmbedInput(Prompt(field, each), field)
        for field, each in zip(fields, values["input"], strict=True)
    ]
    options = {name: values[name] for name in EMBED if name in values}
    return EmbedSpec(inputs=inputs, options=options, names={"inputs": "input"})


def _embeddings_json(
    parsed: ParsedRequest, whole: Chunk, values: Json, served: ServedModel
) -> Json:
    assert whole.finish is not None
    write = _base64 if values.get("encoding_format") == "base64" else _numbers
    num_tokens = whole.finish.usage.prompt
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(each)}
            for index, each in enumerate(whole_embeddings(parsed, whole))
        ],
        "model": served.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _numbers(embedding_D: Embeddings) -> list[float]:
    numbers: list[float] = embedding_D.tolist()
    return numbers


def _base64(embedding_D: Embeddings) -> str:
    return base64.b64encode(np.asarray(embedding_D, "<f4").tobytes()).decode()


class Tokenize(Route):
    path = "/tokenize"
    help = "a text's token ids, or a conversation's"
    fields = (
        JsonField("prompt", STRING, "the text"),
        JsonField("add_special_tokens", BOOLEAN, "add what the tokenizer adds to a prompt"),
        JsonField("messages", CONVERSATION, "instead: a conversation, rendered by the template"),
        *TOOLS,
        MODEL,
        JsonField("return_token_strs", BOOLEAN, "each token as text, too"),
    )

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            check_model(values, call.served)
            if ("prompt" in values) == ("messages" in values):
                raise InvalidFieldError("prompt", "or messages must be given, and not both")
            if values.get("tools") and "prompt" in values:
                raise InvalidFieldError("tools", "are for messages. Give these, or leave it out")
            ids = await self._tokens(values, call, exchange.num_bytes)
            wants_texts = values.get("return_token_strs")
            whole = partial(_tokens_json, ids, call if wants_texts else None, call.served.context)
        await exchange.answer_made(whole, is_long=len(ids) > MAX_INLINE_TOKENS)

    async def _tokens(self, values: Json, call: Call, num_bytes: int) -> Sequence[int]:
        if "messages" in values:
            prompt = Prompt("messages", values["messages"])
            spec = partial(generate_spec, prompt, values, TOOLS, {})
            async with call.charged() as charge:
                ids = (await call.read(spec, num_bytes)).given_ids
                charge(len(ids))
            return ids
        special = values.get("add_special_tokens", True)
        return await call.tokenize(values["prompt"], "prompt", special)


def _tokens_json(ids: Sequence[int], call: Call | None, context: int) -> Json:
    texts = None if call is None else [call.text().piece(id) for id in ids]
    return {"count": len(ids), "max_model_len": context, "tokens": list(ids), "token_strs": texts}


class Detokenize(Route):
    path = "/detokenize"
    help = "token ids as text"
    fields = (JsonField("tokens", INTEGERS, "the token ids", is_required=True), MODEL)

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            check_model(values, call.served)
            text = await call.detokenize(values["tokens"], "tokens", skip_special_tokens=False)
        await exchange.answer_json({"prompt": text})
