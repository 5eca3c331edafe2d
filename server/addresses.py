"""How hosts and ports are written, and which machine a host is on. Imports only errors of ours.

Knows: loopback, the brackets around IPv6. Does not know: who listens where.
"""

import ipaddress
import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from quill.server.errors import StartError

logger = logging.getLogger(__name__)
_Opened = TypeVar("_Opened")

# Beside a server's port for gRPC: where its metrics and its HTTP are, unless something is there.
METRICS_OFFSET, HTTP_OFFSET = 1, 2
MAX_PORT = 65535

# For channels within a machine: gRPC asks $http_proxy for these, too, and shows it what is sent.
DIRECTLY = (("grpc.enable_http_proxy", 0),)


def write_address(host: str, port: int) -> str:
    """HOST:PORT, as clients and URLs take it."""
    if ":" in host and not host.startswith("unix:"):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def ports_to_try(choice: int | Literal["auto", "off"], port: int, offset: int) -> tuple[int, ...]:
    """In order; 0: any free one. "auto": the port beside `port`, or a free one if it is taken."""
    if choice == "off":
        return ()
    if choice != "auto":
        return (choice,)
    return (port + offset, 0) if 0 < port <= MAX_PORT - offset else (0,)


def open_first(ports: Sequence[int], open: Callable[[int], _Opened], what: str) -> _Opened:
    """What `open` gives for the first port that isn't taken; the last port's StartError."""
    for port in ports[:-1]:
        try:
            return open(port)
        except StartError:
            logger.warning("port %d is taken: %s gets another port", port, what)
    return open(ports[-1])


def check_address(text: str) -> str:
    """gRPC itself would guess: 443 for a port that is missing, another port for one above 65535.

    ValueError says what is wrong.
    """
    host, _, number = text.rpartition(":")
    if "/" in text:
        raise ValueError(f"{text!r} isn't HOST:PORT: leave out http:// and paths")
    if not host or not number.isdecimal():
        raise ValueError(f"{text!r} isn't HOST:PORT, such as 127.0.0.1:50051")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r} isn't HOST:PORT: write [::1]:50051 for IPv6")
    if not 1 <= int(number) <= MAX_PORT:
        raise ValueError(f"{text!r} has port {number}; ports are from 1 to {MAX_PORT}")
    return text


def is_loopback(host: str) -> bool:
    """Names other than localhost may mean anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """All addresses are where a server listens, and none that a client can call."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not ip.is_unspecified:
        return host
    return "127.0.0.1" if ip.version == 4 else "::1"
