"""What a browser gets: the page at `/`, `/docs` and `/openapi.json`, from the tables of fields.

Knows: routes and their fields, OpenAPI, HTML, headers. Does not know: what routes do.
"""

import base64
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from html import escape
from importlib import metadata, resources

from quill.server.frontend.json_values import Json, JsonField
from quill.server.http.exchange import TIMEOUT_HEADER, Exchange
from quill.server.http.texts import Route

_ERRORS = {
    "400": "a field is wrong, or isn't supported: `error.param` names it",
    "401": "there is no API key, or it isn't known",
    "403": "the API key was revoked, or another page asks",
    "404": "there is no such path, or no such model",
    "408": "the deadline passed before there was anything to send",
    "413": "the body is too large",
    "415": "the body isn't application/json",
    "429": "the server or the key is at its limit; `retry-after` says when to come back",
    "503": "the server is loading or stopping",
}
_TIMEOUT: Json = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "how many seconds the client will wait; the server stops then, too",
    "schema": {"type": "number"},
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}h2{margin-top:2.5rem}code{font-family:ui-monospace,monospace}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;"
    "padding:.3rem .8rem .3rem 0;border-bottom:1px solid #8884}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
DOCS_HEADERS = (
    (
        "content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
)

_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts, styles and connections of this server only, and no inline ones.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_PAGE_HEADERS = (
    ("content-security-policy", _POLICY),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-cache"),
)


def page_files() -> Mapping[str, Callable[[Exchange], Awaitable[None]]]:
    """What answers each path. They need no API key: they contain nothing of the model."""
    paths = {}
    for file in resources.files("quill.server.http").joinpath("page").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        kind = _KINDS[file.name.rpartition(".")[2]]
        paths[path] = partial(_send_file, file.read_bytes(), kind)
    return paths


async def _send_file(body: bytes, kind: str, exchange: Exchange) -> None:
    await exchange.answer(body, kind, headers=_PAGE_HEADERS)


def openapi(routes: Iterable[Route]) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quill", "version": metadata.version("quill")},
        "security": [{"key": []}, {}],
        "paths": {route.path: {route.verb.lower(): _operation(route)} for route in routes},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> Json:
    ok = {"description": route.help, "content": {"application/json": {}}}
    responses: Json = {"200": ok}
    operation: Json = {"summary": route.help, "parameters": [_TIMEOUT], "responses": responses}
    if any(field.name == "stream" for field in route.fields):
        ok["content"] = {"application/json": {}, "text/event-stream": {}}
    for status, meaning in _ERRORS.items():
        responses[status] = {"description": meaning}
    if route.verb == "POST":
        content = {"application/json": {"schema": _schema(route)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _schema(route: Route) -> Json:
    return {
        "type": "object",
        "description": "Unknown fields are ignored; null is the same as leaving a field out. "
        f"Rejected by name: {', '.join(each.name for each in route.unsupported) or 'none'}.",
        "properties": {field.name: _property(field) for field in route.fields},
        "required": [field.name for field in route.fields if field.is_required],
    }


def _property(field: JsonField) -> Json:
    return {**field.kind.schema, "description": field.help}


def docs_page(api: Json) -> bytes:
    """The same for people. No script, and nothing from another host."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>Quill's HTTP calls</title><style>{_STYLE}</style><h1>Quill's HTTP calls</h1>",
        "<p>The same for programs: <a href=/openapi.json>openapi.json</a>. Beside these there are ",
        "<a href=/health>/health</a>, <a href=/metrics>/metrics</a>, <a href=/version>/version</a>",
    ]
    for path, operations in api["paths"].items():
        for verb, operation in operations.items():
            parts.append(_section(verb, path, operation))
    parts.append("<h2>When something is wrong</h2><table>")
    parts += [f"<tr><td>{status}<td>{escape(each)}" for status, each in _ERRORS.items()]
    return "".join((*parts, "</table></html>\n")).encode()


def _section(verb: str, path: str, operation: Json) -> str:
    title = f"<h2><code>{verb.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}."
    body = operation.get("requestBody")
    if body is None:
        return title
    schema = body["content"]["application/json"]["schema"]
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in schema['required'] else ''}"
        f"<td>{escape(_kind(each))}<td>{escape(each['description'])}"
        for name, each in schema["properties"].items()
    ]
    heads = "<tr><th>field<th>holds<th>means"
    return f"{title}<p>{escape(schema['description'])}<table>{heads}{''.join(rows)}</table>"


def _kind(schema: Json) -> str:
    """In a few words."""
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    return str(schema["type"])
