"""The HTTP applications: which path is answered by what, who may call, how errors are sent.

Knows: paths, keys, the order of checks. Does not know: what is requested, sockets.

A page in a browser can reach servers on the same machine that nobody else can. Its requests carry
the page's own address as Origin, or, if it had its name point at this machine, as Host.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata

from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from quill.server.addresses import is_loopback
from quill.server.api.messages import model_message
from quill.server.auth.caller import ANYBODY, Caller, certified_caller
from quill.server.auth.key_file import Keyring
from quill.server.errors import DeadlineError, RequestError, StepError
from quill.server.frontend.call import Calls, RequestContext
from quill.server.frontend.json_values import Json
from quill.server.http.chat import Chat
from quill.server.http.completions import Completions
from quill.server.http.errors import HttpError, body_of, headers_of, status_of
from quill.server.http.exchange import Exchange
from quill.server.http.pages import DOCS_HEADERS, docs_page, openapi, page_files
from quill.server.http.texts import Detokenize, EmbeddingsRoute, Models, Route, Tokenize
from quill.server.settings import Settings
from quill.server.telemetry.metrics import stats
from quill.server.telemetry.tracing import HEADERS

logger = logging.getLogger(__name__)
_CLOSE = (("connection", "close"),)
Registry = Callable[[], Awaitable[CollectorRegistry]]  # of the whole server, as it is now
_HOST = re.compile(r"([a-zA-Z0-9.-]+|\[[0-9a-fA-F:.]+\])(:[0-9]*)?")


class ModelInfo(Route):
    verb = "GET"
    path = "/model"
    help = "everything about the model that is served, as gRPC's GetModel has it"

    async def answer(self, values: Json, context: RequestContext, exchange: Exchange) -> None:
        async with self._calls.open(context) as call:
            info = MessageToDict(
                model_message(call.served),
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
        await exchange.answer_json(info)


class App:
    def __init__(
        self,
        calls: Calls,
        settings: Settings,
        keyring: Keyring | None,
        registry: Registry,
        is_serving: Callable[[], bool],
    ) -> None:
        self._calls = calls
        self._settings = settings
        self._guard = Guard(settings.host, keyring)
        self._registry = registry
        self._is_serving = is_serving
        kinds = (Chat, Completions, EmbeddingsRoute, Tokenize, Detokenize, Models, ModelInfo)
        self._routes: dict[str, Route] = {kind.path: kind(calls) for kind in kinds}
        self._api = openapi(self._routes.values())
        self._pages: Mapping[str, Callable[[Exchange], Awaitable[None]]] = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
            "/openapi.json": self._openapi,
            "/docs": self._docs,
            "/stats": self._stats,
            **page_files(),
        }

    async def __call__(self, exchange: Exchange) -> None:
        try:
            self._guard.check(exchange)
            await self._answer(exchange)
        except RequestError as error:
            await _fail(exchange, error)
        except Exception:
            logger.exception("a bug in %s, request %s", exchange.path, exchange.request_id)
            reason = f"a bug in the server; its log has more under {exchange.request_id}"
            await _fail(exchange, StepError(reason))

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path.rstrip("/") or "/"
        page, route = self._pages.get(path), self._routes.get(path)
        if page is None and route is None:
            known = ", ".join(sorted((*self._pages, *self._routes)))
            raise HttpError(404, "path", f"isn't known here; there are {known}")
        verb = "GET" if route is None else route.verb
        if exchange.verb not in (verb, "HEAD" if verb == "GET" else verb):
            allowed = [("allow", verb)]
            raise HttpError(405, "method", f"must be {verb} for this path", allowed)
        if page is not None:
            await page(exchange)
        elif route is not None:
            await self._call(route, exchange)

    async def _call(self, route: Route, exchange: Exchange) -> None:
        caller, deadline = Caller(), None
        try:
            caller = self._guard.caller(exchange)
            deadline = exchange.deadline_s()
            values: Json = {}
            if route.verb == "POST":
                values = await exchange.read_json(self._settings.max_message_bytes, route.read)
        except RequestError as error:
            self._calls.reject(_context(exchange, route, caller, deadline), error)
            raise
        context = _context(exchange, route, caller, deadline)
        await exchange.attend(self._serve(route, values, context, exchange))

    async def _serve(
        self, route: Route, values: Json, context: RequestContext, exchange: Exchange
    ) -> None:
        try:
            # By the loop's clock, time.monotonic. The engine stops before, but for long steps.
            async with asyncio.timeout_at(context.deadline_s):
                await route.answer(values, context, exchange)
        except TimeoutError:
            await _fail(exchange, DeadlineError("the deadline passed"))
        except RequestError as error:
            await _fail(exchange, error)

    async def _health(self, exchange: Exchange) -> None:
        """Needs no API key: orchestrators and load balancers have none."""
        serving = self._is_serving()
        content = {"status": "serving" if serving else "not serving"}
        await exchange.answer_json(content, 200 if serving else 503)

    async def _metrics(self, exchange: Exchange) -> None:
        if "metrics" not in self._settings.allow_unauthenticated:
            self._guard.caller(exchange)
        await _answer_metrics(exchange, await self._registry())

    async def _stats(self, exchange: Exchange) -> None:
        if "metrics" not in self._settings.allow_unauthenticated:
            self._guard.caller(exchange)
        await exchange.answer_json(stats(await self._registry()))

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer_json({"version": metadata.version("quill")})

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer_json(self._api)

    async def _docs(self, exchange: Exchange) -> None:
        await exchange.answer(
            docs_page(self._api), "text/html; charset=utf-8", headers=DOCS_HEADERS
        )


class MetricsApp:
    """What the port for metrics serves, whatever the path. `keyring`: None: anybody may read."""

    def __init__(self, registry: Registry, keyring: Keyring | None) -> None:
        self._registry = registry
        self._keyring = keyring

    async def __call__(self, exchange: Exchange) -> None:
        try:
            if self._keyring is not None:
                self._keyring.identify(exchange.headers("authorization"))
            if exchange.verb not in ("GET", "HEAD"):
                raise HttpError(405, "method", "must be GET", [("allow", "GET")])
            await _answer_metrics(exchange, await self._registry())
        except RequestError as error:
            await _fail(exchange, error)


async def _answer_metrics(exchange: Exchange, registry: CollectorRegistry) -> None:
    encode, kind = choose_encoder(exchange.header("accept") or "")
    await exchange.answer(await asyncio.to_thread(encode, registry), kind)


async def _fail(exchange: Exchange, error: RequestError) -> None:
    """Sends the error, while there is a client that can receive it."""
    if exchange.has_left or exchange.is_over:
        return
    if exchange.has_begun:
        await exchange.break_off(body_of(error))
        return
    await exchange.answer_json(body_of(error), status_of(error), headers_of(error))


def _context(
    exchange: Exchange, route: Route, caller: Caller, deadline: float | None
) -> RequestContext:
    traced = ((name, exchange.header(name)) for name in HEADERS)
    return RequestContext(
        method=route.path,
        frontend="http",
        caller=caller,
        deadline_s=deadline,
        trace_headers={name: value for name, value in traced if value is not None},
        request_id=exchange.request_id,
    )


class Guard:
    """`host` is the address that the server was told to listen at."""

    def __init__(self, host: str, keyring: Keyring | None) -> None:
        self._is_local = is_loopback(host)
        self._keyring = keyring

    def check(self, exchange: Exchange) -> None:
        """Of every request, before anything else is looked at."""
        if exchange.headers("transfer-encoding") and exchange.headers("content-length"):
            # Two servers in a row might each believe another one.
            reason = "came with transfer-encoding; one of them must go"
            raise HttpError(400, "content-length", reason, _CLOSE)
        host = exchange.header("host") or ""
        if self._is_local and not is_loopback(_name(host)):
            reason = "isn't this machine; the server listens for this machine only"
            raise HttpError(403, "host", reason)
        for origin in exchange.headers("origin"):
            if origin.partition("://")[2].lower() != host.lower():
                reason = "is another page's; only pages of this server may call it"
                raise HttpError(403, "origin", reason)

    def caller(self, exchange: Exchange) -> Caller:
        """By its API key; without those, by its certificate, if it had to show one."""
        if self._keyring is not None:
            return self._keyring.identify(exchange.headers("authorization"))
        names = exchange.peer_names
        return certified_caller(names) if names else ANYBODY


def _name(host: str) -> str:
    """Without the port; empty if it makes no sense."""
    found = _HOST.fullmatch(host)
    return found[1].lower() if found else ""
