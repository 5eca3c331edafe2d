"""A small server with OpenAI's protocol that isn't Quill's: words are its tokens.

A token's log-probability is -1 for each of its characters; the likeliest token is the word "so".
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROGRAM = "Sure:\n```python\ndef double(x):\n    return 2 * x\n```\n"
CALL = {"name": "weather_today", "arguments": '{"city": "Paris"}'}


class OtherServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        has_echo: bool = True,
        num_busy: int = 0,
        key: str | None = None,
        is_broken: bool = False,
        has_models: bool = True,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.has_echo, self.num_busy, self.key = has_echo, num_busy, key
        self.is_broken, self.has_models = is_broken, has_models
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: OtherServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send(200, {"data": [{"id": "words"}] if self.server.has_models else None})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if self.server.num_busy > 0:
            self.server.num_busy -= 1
            self._send(429, {"error": {"message": "busy"}})
        elif self.server.is_broken:
            self._send(200, {"choices": []})
        elif self.path == "/v1/completions":
            self._send(200, {"choices": [self._complete(body)]})
        else:
            assert self.path == "/v1/chat/completions"
            self._send(200, {"choices": [{"message": self._chat(body)}]})

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if "logprobs" not in body:
            return {"text": " 3 + 4 = 7. So the answer is 7.\nQuestion: why?"}
        text = f"{body['prompt'] if self.server.has_echo else ''} so"
        found = list(re.finditer(r"\s*\S+|\s+$", text))
        tokens = [each.group() for each in found]
        logprobs = [None, *(-float(len(token)) for token in tokens[1:])]
        best = [None, *({" so": -3.0, token: -float(len(token))} for token in tokens[1:])]
        offsets = [each.start() for each in found]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {
            "text": text,
            "logprobs": dict(zip(names, (tokens, logprobs, best, offsets), strict=True)),
        }

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        if "tools" in body:
            return {"content": None, "tool_calls": [{"type": "function", "function": CALL}]}
        return {"content": PROGRAM}

    def _send(self, status: int, body: dict[str, Any]) -> None:
        if self.server.key not in (None, (self.headers["Authorization"] or "")[len("Bearer ") :]):
            status, body = 401, {"error": {"message": "wrong key"}}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: it would be printed."""


@contextmanager
def other_server(**options: Any) -> Iterator[OtherServer]:
    with OtherServer(**options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
