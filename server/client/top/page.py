"""One look at a server: its page of metrics, fetched and read.

Knows: HTTP, TLS, Prometheus' text. Does not know: what the numbers mean.

A server is named by any of its ports: its HTTP and metrics ports have the page, and beside the gRPC
port it is at the next one, unless somebody chose otherwise.
"""

import http.client
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

from quill.server.client.access import Access
from quill.server.errors import ServerError

TIMEOUT_S = 2.0
MAX_PORT = 65535
_MAX_BYTES = 4 * 2**20
_LINE = re.compile(r"^(quill_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = frozenset[tuple[str, str]]


class PageError(ServerError):
    """There is no page of a server's metrics."""


@dataclass(frozen=True)
class Look:
    """What a server said at one moment."""

    at_s: float
    values: Mapping[tuple[str, Labels], float]

    def value(self, name: str, *label: tuple[str, str]) -> float:
        """Of all labels together, or of those that have these."""
        wanted = set(label)
        return sum(
            value
            for (each, labels), value in self.values.items()
            if each == name and wanted <= labels
        )

    def buckets(self, name: str) -> dict[float, float]:
        """How many observations there are up to each bound, the last being infinity."""
        found: dict[float, float] = {}
        for (each, labels), value in self.values.items():
            if each == f"{name}_bucket":
                bound = float(dict(labels)["le"])
                found[bound] = found.get(bound, 0.0) + value
        return dict(sorted(found.items()))


def read_page(text: str, at_s: float) -> Look:
    values = {
        (name, frozenset(_LABEL.findall(labels))): float(value)
        for name, labels, value in _LINE.findall(text)
    }
    if not values:
        raise PageError("what answers there isn't a Quill server's metrics")
    return Look(at_s, values)


@dataclass(frozen=True)
class Place:
    """Where a server is. `name`: what its certificate should say, if that isn't its host."""

    host: str
    port: int
    name: str = ""


class Page:
    """Of one server. Remembers at which of its ports the page was."""

    def __init__(self, place: Place, access: Access) -> None:
        self._place = place
        self._access = access
        self._tls = access.http_context() if access.uses_tls else None
        self._ports = [port for port in (place.port, place.port + 1) if port <= MAX_PORT]

    def look(self) -> Look:
        """Errors are PageErrors."""
        problem = ""
        for port in self._ports:
            try:
                found = read_page(self._fetch(port), time.monotonic())
            except PageError as error:
                problem = problem or str(error)
            except (OSError, http.client.HTTPException) as error:
                problem = problem or _reason(error)
            else:
                self._ports = [port]
                return found
        raise PageError(problem)

    def _fetch(self, port: int) -> str:
        connection = http.client.HTTPConnection(self._place.host, port, timeout=TIMEOUT_S)
        try:
            connection.connect()
            if self._tls is not None:
                name = self._place.name or self._place.host
                connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=name)
            connection.request("GET", "/metrics", headers=self._headers())
            reply = connection.getresponse()
            content = reply.read(_MAX_BYTES)
        finally:
            connection.close()
        if reply.status == http.client.UNAUTHORIZED:
            raise PageError(
                "wants an API key: give --api-key-file, or start it with "
                "--allow-unauthenticated metrics"
            )
        if reply.status != http.client.OK:
            raise PageError(f"answers {reply.status} {reply.reason}")
        return content.decode("utf-8", "replace")

    def _headers(self) -> dict[str, str]:
        shown = self._tls is not None or self._access.may_show_key(self._place.host)
        return dict(self._access.metadata) if shown else {}


def _reason(error: OSError | http.client.HTTPException) -> str:
    match error:
        case ConnectionRefusedError():
            return "away: nobody listens there"
        case TimeoutError():
            return f"away: no word for {TIMEOUT_S:g} s"
        case ssl.SSLError():
            return f"TLS fails: {getattr(error, 'verify_message', '') or error.reason}"
        case http.client.HTTPException() | ConnectionResetError():
            return "no metrics there, nor at the next port. Is it gRPC, or TLS without --ca?"
    return f"away: {error.strerror or error}"
