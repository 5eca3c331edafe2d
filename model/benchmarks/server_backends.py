"""Benchmarks on a server: Quill's over gRPC, or any with OpenAI's HTTP protocol.

Knows: quill.v1 through the SDK, OpenAI's paths and fields. Does not know: benchmarks.
"""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quill.model.benchmarks.backend import BackendError, Sampling
from quill.model.benchmarks.bfcl import ToolCall
from quill.model.benchmarks.items import ScoreRequest
from quill.model.benchmarks.metrics import Likelihood, cut
from quill.protos import generation_pb2 as pb
from quill.server.addresses import is_loopback
from quill.server.client.access import Access, AccessError
from quill.server.client.errors import CallError
from quill.server.client.requests import Prompt
from quill.server.client.sync_client import Client

_TIMEOUT_S = 600.0
_NUM_ATTEMPTS = 6
_BUSY = {408, 429, 500, 502, 503, 504}
_MAX_STOPS = 4  # OpenAI's own limit; the text is cut here, too


class GrpcBackend:
    def __init__(self, address: str, access: Access, max_concurrency: int) -> None:
        self.max_concurrency = max_concurrency
        self._client = Client(address, access=access)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]:
        return [self._score(each) for each in requests]

    def _score(self, request: ScoreRequest) -> Likelihood:
        """The continuation's tokens are the last ones that have its bytes."""
        text, left = request.context + request.continuation, len(request.continuation.encode())
        with _errors_translated():
            response = self._client.generate(
                text, prompt_logprobs=1, max_new_tokens=1, temperature=0.0, timeout_s=_TIMEOUT_S
            )
        tokens: list[pb.TokenLogprobs] = []
        for token in reversed(response.prompt_logprobs):
            if left <= 0 or not token.HasField("logprob"):
                break
            tokens.append(token)
            left -= len(token.bytes)
        is_greedy = all(each.token_id == each.top[0].token_id for each in tokens)
        return Likelihood(sum(each.logprob for each in tokens), is_greedy)

    def generate(self, prompt: str, is_chat: bool, sampling: Sampling) -> str:
        given: Prompt = [{"role": "user", "content": prompt}] if is_chat else prompt
        with _errors_translated():
            response = self._client.generate(
                given,
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                repetition_penalty=1.0,
                seed=sampling.seed,
                stop=sampling.stop,
                timeout_s=_TIMEOUT_S,
            )
        return response.sequences[0].text

    def call_tools(
        self, question: str, tools: Sequence[dict[str, Any]], choice: str, sampling: Sampling
    ) -> list[ToolCall]:
        with _errors_translated():
            response = self._client.generate(
                [{"role": "user", "content": question}],
                tools=tools,
                tool_choice=choice,
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                repetition_penalty=1.0,
                seed=sampling.seed,
                timeout_s=_TIMEOUT_S,
            )
        calls = response.sequences[0].tool_calls
        return [ToolCall(each.name, each.arguments) for each in calls]


@contextmanager
def _errors_translated() -> Iterator[None]:
    try:
        yield
    except CallError as error:
        raise BackendError(str(error)) from error


class HttpBackend:
    """`url`: the server's, with or without /v1. `model`: by default the first of /v1/models."""

    def __init__(self, url: str, access: Access, max_concurrency: int, model: str | None) -> None:
        self.max_concurrency = max_concurrency
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        if access.api_key and parts.scheme == "http" and not access.may_show_key(host):
            raise AccessError(f"without TLS the API key could be read on its way to {host}")
        self._url = url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
        handlers: list[urllib.request.BaseHandler] = []
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=access.http_context()))
        if is_loopback(host):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        self._headers = {"Content-Type": "application/json", **dict(access.metadata)}
        self._model = model or self._first_model()

    def _first_model(self) -> str:
        answer = self._send("/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            shown = json.dumps(answer)[:200]
            raise BackendError(f"{self._url}/models lists no model: {shown}") from None

    def score(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]:
        return [self._score(each) for each in requests]

    def _score(self, request: ScoreRequest) -> Likelihood:
        """lm-evaluation-harness's request: one token, because some servers reject none."""
        text, start = request.context + request.continuation, len(request.context)
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        found = self._choice("/completions", body).get("logprobs") or {}
        offsets = found.get("text_offset") or []
        if not any(start <= at < len(text) for at in offsets):
            raise self._no_echo()
        ends = [*offsets[1:], len(text)]
        places = [
            at for at, end in enumerate(ends) if at and offsets[at] < len(text) and end > start
        ]
        logprobs = [found["token_logprobs"][at] for at in places]
        best = [max(found["top_logprobs"][at].values()) for at in places]
        is_greedy = all(given >= top for given, top in zip(logprobs, best, strict=True))
        return Likelihood(sum(logprobs), is_greedy)

    def _no_echo(self) -> BackendError:
        return BackendError(
            f"{self._url} doesn't return the prompt's log-probabilities (`echo` with `logprobs`), "
            "which this task needs. Tasks that generate text work: gsm8k, humaneval, mbpp, bfcl"
        )

    def generate(self, prompt: str, is_chat: bool, sampling: Sampling) -> str:
        body = _options(sampling) | {"stop": sampling.stop[:_MAX_STOPS] or None}
        if is_chat:
            message = self._chat(prompt, body)
            return cut(message.get("content") or "", sampling.stop)
        text = self._choice("/completions", body | {"prompt": prompt})["text"]
        return cut(text, sampling.stop)

    def call_tools(
        self, question: str, tools: Sequence[dict[str, Any]], choice: str, sampling: Sampling
    ) -> list[ToolCall]:
        functions = [{"type": "function", "function": each} for each in tools]
        body = _options(sampling) | {"tools": functions, "tool_choice": choice}
        calls = self._chat(question, body).get("tool_calls") or []
        return [ToolCall(each["function"]["name"], each["function"]["arguments"]) for each in calls]

    def _chat(self, message: str, body: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": message}]
        return dict(self._choice("/chat/completions", body | {"messages": messages})["message"])

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._send(path, body)
        try:
            return dict(answer["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            shown = json.dumps(answer)[:200]
            raise BackendError(f"{self._url}{path} answered without `choices`: {shown}") from None

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Again, later, while the server is busy or can't be reached."""
        data = None if body is None else json.dumps(body | {"model": self._model}).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        for attempt in range(_NUM_ATTEMPTS):
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code}: {error.read(500).decode('utf-8', 'replace')}"
                if error.code not in _BUSY:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = str(error)
            if attempt + 1 < _NUM_ATTEMPTS:
                time.sleep(0.2 * 2**attempt)
        raise BackendError(f"{self._url}{path} failed: {failure}")


def _options(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }
