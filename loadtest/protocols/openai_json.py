"""Requests and answers in the JSON of OpenAI's chats and completions.

Knows: their shapes, streamed. Does not know: HTTP, clocks.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from quill.loadtest.protocols.door import CallError
from quill.loadtest.protocols.options_json import messages_json, options_json
from quill.protos import generation_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = b"[DONE]"
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_TIMES = ("queue_ms", "first_token_ms", "total_ms")
_ENDS = {"length": pb.FINISH_REASON_LENGTH, "deadline": pb.FINISH_REASON_DEADLINE}


def path_and_body(request: pb.GenerateRequest) -> tuple[str, dict[str, Any]]:
    """Where it is asked, and with which words. Tokens are wanted, too: they are what counts."""
    body = options_json(request) | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    match request.WhichOneof("input"):
        case "messages":
            return CHAT, body | {"messages": messages_json(request)}
        case "prompt":
            return COMPLETIONS, body | {"prompt": request.prompt}
        case "prompt_ids":
            return COMPLETIONS, body | {"prompt": list(request.prompt_ids.ids)}
    return COMPLETIONS, body  # which breaks a rule, as it should


def failure(status: int, body: bytes) -> CallError:
    """Quill says the gRPC status as `code`; others may say what they like."""
    try:
        error = json.loads(body)["error"]
        return _error(error, _STATUS.get(status, "INTERNAL"))
    except (ValueError, KeyError, TypeError):
        return CallError(_STATUS.get(status, "INTERNAL"), f"HTTP {status}")


def _error(error: dict[str, Any], otherwise: str) -> CallError:
    code = str(error.get("code") or "").upper()
    known = code in {*_STATUS.values(), "FAILED_PRECONDITION", "UNIMPLEMENTED", "INTERNAL"}
    return CallError(code if known else otherwise, str(error.get("message")))


def read_chunks(request: pb.GenerateRequest, events: Iterable[bytes]) -> Iterator[pb.GenerateChunk]:
    """What events say, as gRPC's stream says it. A choice's end waits for the usage."""
    ends: dict[int, pb.GenerateChunk] = {}
    for data in events:
        if data == DONE:
            yield from (ends[index] for index in sorted(ends))
            return
        event = json.loads(data)
        if "error" in event:
            raise _error(event["error"], "INTERNAL")
        for choice in event["choices"]:
            chunk = _chunk(choice)
            if chunk.token_ids or chunk.text:
                yield chunk
            if choice.get("finish_reason"):
                ends[chunk.sequence] = _end(request, event, choice)
        _note_usage(event.get("usage"), ends)


def _chunk(choice: dict[str, Any]) -> pb.GenerateChunk:
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return pb.GenerateChunk(
        sequence=choice["index"], text=text or "", token_ids=choice.get("token_ids") or []
    )


def _end(
    request: pb.GenerateRequest, event: dict[str, Any], choice: dict[str, Any]
) -> pb.GenerateChunk:
    reason = choice.get("quill", {}).get("finish_reason", choice["finish_reason"])
    # One word for two things: without strings or tokens that stop, it is the model's own end.
    has_stops = request.stop or request.stop_token_ids
    own_end = pb.FINISH_REASON_STOP if has_stops else pb.FINISH_REASON_EOS
    timings = event.get("timings") or {}
    return pb.GenerateChunk(
        sequence=choice["index"],
        finish_reason=_ENDS.get(reason, own_end),
        seed=event.get("seed", 0),
        timings=pb.Timings(**{name: timings.get(name, 0.0) for name in _TIMES}),
    )


def _note_usage(usage: dict[str, Any] | None, ends: dict[int, pb.GenerateChunk]) -> None:
    """Told once for all choices: prompts are the same, and answers' tokens are counted here."""
    if usage is not None and 0 in ends:
        ends[0].usage.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        ends[0].usage.cached_tokens = details.get("cached_tokens", 0)
