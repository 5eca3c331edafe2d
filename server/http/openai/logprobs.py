"""Log-probabilities in the three shapes that clients know.

Knows: OpenAI's for chats and for completions, vLLM's for prompts. Does not know: who asked.
"""

import codecs
from collections.abc import Sequence

from quill.protos import generation_pb2 as pb
from quill.server.service.json_fields import Json

_Token = pb.TokenLogprobs | pb.Alternative


def chat_logprobs(tokens: Sequence[pb.TokenLogprobs]) -> Json:
    content = [
        {**_chat_token(each), "top_logprobs": [_chat_token(one) for one in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: _Token) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


class CompletionLogprobs:
    """Of one choice, whose tokens may come one after another."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters before the next token

    def add(self, tokens: Sequence[pb.TokenLogprobs]) -> Json:
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(each.bytes))
        return {
            "tokens": [_name(each) for each in tokens],
            "token_logprobs": [_logprob(each) for each in tokens],
            "top_logprobs": [_top(each) for each in tokens],
            "text_offset": offsets,
        }


def _top(token: pb.TokenLogprobs) -> dict[str, float] | None:
    """The token itself is among them, as OpenAI has it. None: it follows nothing."""
    if not token.HasField("logprob"):
        return None
    found: dict[str, float] = {}
    tokens: list[_Token] = [*token.top, token]
    for each in tokens:
        found.setdefault(_name(each), each.logprob)
    return found


def prompt_logprobs(tokens: Sequence[pb.TokenLogprobs]) -> list[Json | None]:
    return [_prompt_token(each) if each.HasField("logprob") else None for each in tokens]


def _prompt_token(token: pb.TokenLogprobs) -> Json:
    tokens: list[_Token] = [token, *token.top]
    ranks = {each.token_id: rank for rank, each in enumerate(token.top, start=1)}
    return {
        str(each.token_id): {
            "logprob": each.logprob,
            "rank": ranks.get(each.token_id),  # None: beyond those that were asked for
            "decoded_token": each.text,
        }
        for each in tokens
    }


def _logprob(token: pb.TokenLogprobs) -> float | None:
    return token.logprob if token.HasField("logprob") else None


def _name(token: _Token) -> str:
    """As OpenAI writes parts of characters: they would all look alike, and they are keys."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
