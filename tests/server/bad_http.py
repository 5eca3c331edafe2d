"""HTTP that no honest client sends: JSON with anything in it, heads that lie, noise.

Knows: HTTP/1.1, the fields of each route. Does not know: servers.
"""

import json
import random
from typing import Any

from quill.server.http.chat import Chat
from quill.server.http.completions import Completions
from quill.server.http.texts import Detokenize, EmbeddingsRoute, Tokenize
from tests.server.bad_bytes import Sent
from tests.server.bad_calls import FLOATS, INTEGERS, TEXTS, mutate, noise

ROUTES = (Chat, Completions, EmbeddingsRoute, Tokenize, Detokenize)
PATHS = (*(route.path for route in ROUTES), "/v1/models", "/metrics", "/docs", "/", "/%00", "/v1/x")
FIELDS = sorted({field.name for route in ROUTES for field in route.fields})
NAMES = ("role", "content", "type", "text", "include_usage", "function", "tool_calls", "5", "")
HEADS = (
    "content-length: 0",
    "content-length: 99999999999999999999",
    "content-length: -1",
    "content-length: 1_0",
    "transfer-encoding: chunked",
    "transfer-encoding: gzip, chunked",
    "expect: 100-continue",
    "connection: upgrade",
    "upgrade: websocket",
    "host: evil.example",
    "origin: null",
    "authorization: Bearer \xff\xfe",
    "content-type: text/plain",
    "content-encoding: gzip",
    "x-request-timeout: 0.001",
    "x-request-timeout: nan",
    "traceparent: 00-zz-zz-zz",
    f"x: {'y' * 9000}",
)


def make_http(chance: random.Random) -> Sent:
    kind = chance.choice(tuple(KINDS))
    return Sent(KINDS[kind](chance), chance.random() < 0.3, f"HTTP: {kind}")


def _request(
    path: str, body: bytes, *lines: str, verb: str = "POST", length: int | None = None
) -> bytes:
    """It ends the connection, so that a reader knows where the reply ends."""
    own = ("host: 127.0.0.1", "connection: close", "content-type: application/json")
    size = f"content-length: {len(body) if length is None else length}"
    head = "\r\n".join((f"{verb} {path} HTTP/1.1", *own, size, *lines, "", ""))
    return head.encode("latin-1") + body


def _value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kinds = ["null", "true", "integer", "float", "text", "list", "object"][: 5 if depth > 2 else 7]
    kind = chance.choice(kinds)
    if kind == "integer":
        return chance.choice(INTEGERS) * chance.choice((1, 1, -1, 10**30))
    if kind == "float":
        return chance.choice(FLOATS)
    if kind == "text":
        return chance.choice((*TEXTS, "\ud800", "never", "base64", "user", "text"))
    if kind == "list":
        return [_value(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 30)))]
    if kind == "object":
        names = chance.sample(NAMES, 3)
        return {name: _value(chance, depth + 1) for name in names}
    return None if kind == "null" else True


def _right(chance: random.Random, path: str) -> dict[str, Any]:
    """What would be answered."""
    ids = [chance.randrange(512) for _ in range(chance.choice((1, 3, 17, 40)))]
    if path == Chat.path:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": chance.choice(TEXTS)}]}
        if chance.random() < 0.3:
            function = {"name": "f", "parameters": {"properties": {"a": _value(chance)}}}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = chance.choice(("required", "auto", "none", _value(chance)))
    elif path == Detokenize.path:
        return {"tokens": ids}
    elif path == EmbeddingsRoute.path:
        return {"input": chance.choice((ids, [ids, ids], "a"))}
    else:
        body = {"prompt": chance.choice((ids, [ids, [5, 6]], "a", ["a", "b"]))}
    more = {"stream": True, "n": 2, "logprobs": 1, "echo": True, "temperature": 1.0, "top_k": 3}
    body |= {name: more[name] for name in more if chance.random() < 0.2}
    return body | {"max_tokens": chance.choice((0, 1, 2, 8))}


def _json(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=True).encode()


def _nearly_right(chance: random.Random) -> bytes:
    route = chance.choice(ROUTES)
    body = _right(chance, route.path)
    for name in chance.sample(FIELDS, chance.choice((0, 1, 1, 2))):
        body[name] = _value(chance)
    return _request(route.path, _json(body))


def _any_json(chance: random.Random) -> bytes:
    body = {name: _value(chance) for name in chance.sample(FIELDS, 6)}
    return _request(chance.choice(PATHS), _json(chance.choice((body, _value(chance)))))


def _mutated_body(chance: random.Random) -> bytes:
    route = chance.choice(ROUTES)
    return _request(route.path, mutate(chance, _json(_right(chance, route.path))))


def _any_head(chance: random.Random) -> bytes:
    path = chance.choice(PATHS)
    lines = chance.sample(HEADS, chance.randint(1, 3))
    verb = chance.choice(("POST", "GET", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "PRI", ""))
    lie = chance.choice((None, None, 0, 5, 10**9))
    return _request(path, _json(_right(chance, path)), *lines, verb=verb, length=lie)


def _mutated(chance: random.Random) -> bytes:
    route = chance.choice(ROUTES)
    return mutate(chance, _request(route.path, _json(_right(chance, route.path))))


def _several(chance: random.Random) -> bytes:
    """One after another, without waiting for answers."""
    right = _request(Chat.path, _json(_right(chance, Chat.path))).replace(b"close", b"keep-alive")
    return right * chance.randint(2, 5) + noise(chance, 20)


def _noise(chance: random.Random) -> bytes:
    return noise(chance, 300)


KINDS = {
    "JSON that is nearly right": _nearly_right,
    "any JSON": _any_json,
    "a changed body": _mutated_body,
    "any head": _any_head,
    "a changed request": _mutated,
    "several at once": _several,
    "noise": _noise,
}
