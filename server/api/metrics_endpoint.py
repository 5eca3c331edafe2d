"""Answers GET /metrics, in the clear or with TLS.

Knows: HTTP, Prometheus' text. Does not know: what is counted, gRPC.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from quill.server.addresses import write_address
from quill.server.auth.key_file import Keyring
from quill.server.auth.tls import http_context
from quill.server.errors import RequestError, StartError
from quill.server.settings import TlsFiles

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_MAX_CALLERS = 16
_MAX_CALL_S = 5.0  # from connecting to the last byte of the answer, which takes milliseconds
_POLL_S = 0.1  # how long stopping may take, and hanging up

logger = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A caller that says nothing, or little by little, keeps only its own thread, and not long."""

    daemon_threads = True
    request_queue_size = 64  # connections that wait to be accepted
    max_call_s = _MAX_CALL_S

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.Semaphore(_MAX_CALLERS)
        self._due_s: dict[socket.socket, float] = {}  # when each caller is hung up on

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hangs up on callers that are too many: threads are for those who want text."""
        if self._places.acquire(blocking=False):
            self._due_s[request] = time.monotonic() + self.max_call_s
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._due_s[request]
            self._places.release()

    def service_actions(self) -> None:
        """Comes every _POLL_S. Whose time is over reads an end, and leaves its thread."""
        now_s = time.monotonic()
        for request in [each for each, due_s in self._due_s.copy().items() if due_s < now_s]:
            with contextlib.suppress(OSError):  # it has just left by itself
                socket.socket.shutdown(request, socket.SHUT_RDWR)  # ssl's own isn't for two threads

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that failed, a caller that left: theirs, not ours."""
        logger.debug("a reader of metrics failed", exc_info=True)


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    tls: TlsFiles | None = None,
    keyring: Keyring | None = None,
    max_call_s: float = _MAX_CALL_S,
) -> tuple[int, Callable[[], None]]:
    """The port it took, and what stops it. With a keyring, only callers with a key may read."""
    app: WSGIApplication = make_wsgi_app(registry)
    if keyring is not None:
        app = _guarded(app, keyring)
    try:
        server = make_server(host, port, app, _server_class(host, tls, max_call_s), _Handler)
    except OSError as error:
        raise StartError(
            f"can't serve metrics at {write_address(host, port)}: {error.strerror}. Give another "
            "--metrics-port, or --metrics-port off"
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
    )
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


def _guarded(app: "WSGIApplication", keyring: Keyring) -> "WSGIApplication":
    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        header = environ.get("HTTP_AUTHORIZATION")
        try:
            keyring.identify([] if header is None else [header])
        except RequestError as error:
            challenge = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
            start_response("401 Unauthorized", challenge)
            return [f"{error}\n".encode()]
        return app(environ, start_response)

    return answer


def _server_class(host: str, tls: TlsFiles | None, limit_s: float) -> type[WSGIServer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    contexts = None if tls is None else http_context(tls)

    class Server(_Server):
        address_family = family
        max_call_s = limit_s

        def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
            connection, address = super().get_request()
            if contexts is not None:
                # The handshake is left to the caller's own thread.
                connection = contexts.get().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, address

    return Server
