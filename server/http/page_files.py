"""The page at `/`: files as they are, and what a browser may do with them.

Knows: which files there are, headers. Does not know: what they say.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import resources

from quill.server.http.wire.exchange import Exchange

_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts, styles and connections of this server alone, and nothing that is written into the page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-cache"),
)


def page_files() -> Mapping[str, Callable[[Exchange], Awaitable[None]]]:
    """What answers each path. Open to all, like any program: they say nothing of the model."""
    paths = {}
    for file in resources.files("quill.server.http").joinpath("page").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        kind = _KINDS[file.name.rpartition(".")[2]]
        paths[path] = partial(_answer, file.read_bytes(), kind)
    return paths


async def _answer(body: bytes, kind: str, exchange: Exchange) -> None:
    await exchange.answer(body, kind, headers=_HEADERS)
