"""`/tokenize` and `/detokenize`, in vLLM's shape.

Knows: its JSON, generation.proto. Does not know: tokenizers.
"""

from collections.abc import Sequence
from functools import partial

from quill.protos import generation_pb2 as pb
from quill.server.errors import InvalidFieldError
from quill.server.http.openai.chat import CONVERSATION
from quill.server.http.openai.models import MODEL, check_model
from quill.server.http.wire.exchange import Exchange
from quill.server.http.wire.route import Route
from quill.server.service.call import MAX_INLINE_TOKENS, Call
from quill.server.service.generation_options import fill
from quill.server.service.json_fields import BOOLEAN, INTEGERS, STRING, Field, Json
from quill.server.service.origin import Origin
from quill.server.service.tool_options import TOOLS

_OF_TEXT = (
    Field("prompt", STRING, "the text", "text"),
    Field("add_special_tokens", BOOLEAN, "what a prompt begins with", "add_special_tokens"),
)


class Tokenize(Route):
    path = "/tokenize"
    says = "a text's token ids, or a conversation's"
    fields = (
        *_OF_TEXT,
        Field("messages", CONVERSATION, "instead: a conversation, as the model's template has it"),
        *TOOLS,
        MODEL,
        Field("return_token_strs", BOOLEAN, "each token as text, too"),
    )

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        async with self._service.call(origin) as call:
            check_model(values, call.served)
            if ("prompt" in values) == ("messages" in values):
                raise InvalidFieldError("prompt", "or messages must be given, and not both")
            if values.get("tools") and "prompt" in values:
                raise InvalidFieldError("tools", "are for messages. Give these, or leave it out")
            ids, texts = await self._tokens(values, call)
        shown = texts if values.get("return_token_strs") else None
        whole = partial(_whole, ids, shown, call.served.context)
        if len(ids) > MAX_INLINE_TOKENS:
            await exchange.answer_long(whole)
        else:
            await exchange.answer_json(whole())

    async def _tokens(self, values: Json, call: Call) -> tuple[Sequence[int], Sequence[str]]:
        if "messages" in values:
            conversation = pb.Conversation(messages=values["messages"])
            asked = pb.GenerateRequest(messages=conversation)
            fill(asked, values, TOOLS)
            parsed = await call.read(asked)
            text = call.served.text
            assert text is not None, "conversations are text"
            return parsed.given_ids, [text.piece(id) for id in parsed.given_ids]
        message = pb.TokenizeRequest()
        fill(message, values, _OF_TEXT)
        response = await call.tokenize(message)
        return response.token_ids, response.tokens


def _whole(ids: Sequence[int], texts: Sequence[str] | None, context: int) -> Json:
    shown = None if texts is None else list(texts)
    return {"count": len(ids), "max_model_len": context, "tokens": list(ids), "token_strs": shown}


class Detokenize(Route):
    path = "/detokenize"
    says = "token ids as text"
    fields = (
        Field("tokens", INTEGERS, "the token ids", "token_ids", is_required=True),
        MODEL,
    )

    async def answer(self, values: Json, origin: Origin, exchange: Exchange) -> None:
        async with self._service.call(origin) as call:
            check_model(values, call.served)
            message = pb.DetokenizeRequest(skip_special_tokens=False)
            fill(message, values, self.fields)
            response = await call.detokenize(message)
        await exchange.answer_json({"prompt": response.text})
