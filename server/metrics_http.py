"""Answers GET /metrics, in the clear or with TLS.

Knows: HTTP, Prometheus' text. Does not know: what is counted, gRPC.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from server.addresses import write_address
from server.errors import RequestError, StartError
from server.keyring import Keyring
from server.tls import TlsFiles, http_context

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_MAX_CALLERS = 16
_POLL_S = 0.1  # how long stopping may take

logger = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = 10  # a caller that connects and says nothing keeps only its own thread, and not long

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64  # connections that wait to be accepted

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.Semaphore(_MAX_CALLERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hangs up on callers that are too many: threads are for those who want text."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that failed, a caller that left: theirs, not ours."""
        logger.debug("a reader of metrics failed", exc_info=True)


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    tls: TlsFiles | None = None,
    keyring: Keyring | None = None,
) -> tuple[int, Callable[[], None]]:
    """The port it took, and what stops it. With a keyring, only callers with a key are told."""
    app: WSGIApplication = make_wsgi_app(registry)
    if keyring is not None:
        app = _guarded(app, keyring)
    try:
        server = make_server(host, port, app, _server_class(host, tls), _Handler)
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


def _server_class(host: str, tls: TlsFiles | None) -> type[WSGIServer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    contexts = None if tls is None else http_context(tls)

    class Server(_Server):
        address_family = family

        def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
            connection, address = super().get_request()
            if contexts is not None:
                # The handshake is left to the caller's own thread.
                connection = contexts.get().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, address

    return Server
