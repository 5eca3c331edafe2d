"""Answers GET /metrics, in the clear or with TLS.

Knows: HTTP, Prometheus' text. Does not know: what is counted, gRPC.
"""

import logging
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from server.errors import StartError
from server.tls import TlsFiles, http_context

logger = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = 10  # a caller that connects and says nothing keeps only its own thread, and not long

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that failed, a caller that left: theirs, not ours."""
        logger.debug("a reader of metrics failed", exc_info=True)


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, tls: TlsFiles | None = None
) -> tuple[int, Callable[[], None]]:
    """The port it took, and what stops it."""
    try:
        server = make_server(
            host, port, make_wsgi_app(registry), _server_class(host, tls), _Handler
        )
    except OSError as error:
        raise StartError(
            f"can't serve metrics at {host}:{port}: {error.strerror}. Give another --metrics-port, "
            "or --metrics-port off"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


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
