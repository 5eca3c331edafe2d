"""OpenAI's HTTP protocol: chat completions and completions, streamed by server-sent events.

Knows: HTTP/1.1 with reused connections, OpenAI's and vLLM's names. Does not know: clocks.
"""

import http.client
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from quill.loadtest.protocols.grpc import CallError, Chunks
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access
from quill.server.fields import GENERATE

TIMEOUT_HEADER = "x-request-timeout"
DEADLINE_GRACE_S = 5.0  # the server reports a deadline a little after it
_READ_BYTES = 64 * 1024
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
_EARLY_STOPPING = {pb.EARLY_STOPPING_AT_ONCE: True, pb.EARLY_STOPPING_NEVER: "never"}
_CONSTRAINTS = {"json_schema": "json", "lark": "grammar"}  # kinds of constraints, likewise


class HttpClient:
    """As many connections as there are concurrent calls."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self._address = address
        self._access = access or Access()
        self._headers = {"Content-Type": "application/json", **dict(self._access.metadata)}
        self._tls = self._access.http_context() if self._access.uses_tls else None
        self._access.credentials(address)  # refuses to send a key in the clear
        self._idle: list[http.client.HTTPConnection] = []

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        """Closing the generator closes the connection: HTTP has no other cancellation."""
        path, body = path_and_body(request)
        with self._exchange(path, body, timeout_s) as response:
            yield from read_chunks(request, read_events(response))

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        raise CallError("UNIMPLEMENTED", "embeddings are requested over gRPC")

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    @contextmanager
    def _exchange(
        self, path: str, body: dict[str, Any], timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = None
        try:
            connection, response = self._send(path, body, timeout_s)
            if response.status != http.client.OK:
                raise failure(response.status, response.read())
            yield response
            response.read()  # the rest is the last chunk
            self._idle.append(connection)
            connection = None
        except TimeoutError as error:
            raise CallError("DEADLINE_EXCEEDED", f"no data for {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise CallError("UNAVAILABLE", f"the connection broke: {error!r}") from error
        finally:
            if connection is not None:
                connection.close()

    def _send(
        self, path: str, body: dict[str, Any], timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Replaces an idle connection that the server has closed."""
        headers = self._headers | {TIMEOUT_HEADER: f"{timeout_s:g}"}
        while True:
            connection = self._take_idle() or self._connect(timeout_s + DEADLINE_GRACE_S)
            is_used = connection.sock is not None
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s + DEADLINE_GRACE_S)
                connection.request("POST", path, json.dumps(body), headers)
                return connection, connection.getresponse()
            except ConnectionError:
                connection.close()
                if not is_used:
                    raise
            except BaseException:
                connection.close()
                raise

    def _take_idle(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()  # one step for all threads
        except IndexError:
            return None

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, _, port = self._address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if self._tls is None:
            return http.client.HTTPConnection(host, int(port), timeout=timeout_s)
        return http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=self._tls)


def read_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event, without comments."""
    rest = b""
    while data := response.read1(_READ_BYTES):
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            field, _, content = event.partition(b": ")
            if field == b"data":
                yield content


def path_and_body(request: pb.GenerateRequest) -> tuple[str, dict[str, Any]]:
    """The path and the JSON body. Token ids are requested, too: they are what is compared."""
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
    return COMPLETIONS, body  # invalid on purpose


def failure(status: int, body: bytes) -> CallError:
    """Quill sends the gRPC status as `code`; other servers may not."""
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
    """The events as gRPC's chunks. A choice's last chunk waits for the usage."""
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
    # "stop" means both: without stop strings or stop tokens it is the model's own EOS.
    has_stops = request.stop or request.stop_token_ids
    on_stop = pb.FINISH_REASON_STOP if has_stops else pb.FINISH_REASON_EOS
    timings = event.get("timings") or {}
    return pb.GenerateChunk(
        sequence=choice["index"],
        finish_reason=_ENDS.get(reason, on_stop),
        seed=event.get("seed", 0),
        timings=pb.Timings(**{name: timings.get(name, 0.0) for name in _TIMES}),
    )


def _note_usage(usage: dict[str, Any] | None, ends: dict[int, pb.GenerateChunk]) -> None:
    """Sent once for all choices: they share the prompt, and generated tokens are counted here."""
    if usage is not None and 0 in ends:
        ends[0].usage.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        ends[0].usage.cached_tokens = details.get("cached_tokens", 0)


def options_json(request: pb.GenerateRequest) -> dict[str, Any]:
    """The options that are set, by OpenAI's and vLLM's names."""
    options: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name in GENERATE:
            options[GENERATE[field.name].json_name] = _value(field.name, value)
        elif field.name == "constraint":
            options["structured_outputs"] = _constraint_json(value)
    return options


def _value(name: str, value: Any) -> Any:
    match name:
        case "priority":
            return -value  # vLLM's: lower values go first
        case "early_stopping":
            return _EARLY_STOPPING[value]
        case "logit_bias":
            return {str(token): bias for token, bias in value.items()}
        case "stop" | "stop_token_ids":
            return list(value)
    return value


def _constraint_json(constraint: pb.Constraint) -> dict[str, Any]:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        return {}
    value = list(constraint.choice.choices) if kind == "choice" else getattr(constraint, kind)
    return {_CONSTRAINTS.get(kind, kind): value}


def messages_json(request: pb.GenerateRequest) -> list[dict[str, str]]:
    return [{"role": each.role, "content": each.content} for each in request.messages.messages]
