"""How hosts and ports are written, and which machine a host is on. Imports nothing of ours.

Knows: loopback, the brackets around IPv6. Does not know: who listens where.
"""

import ipaddress

# For channels within a machine: gRPC asks $http_proxy for these, too, and shows it what is sent.
DIRECTLY = (("grpc.enable_http_proxy", 0),)


def write_address(host: str, port: int) -> str:
    """HOST:PORT, as clients and URLs take it."""
    if ":" in host and not host.startswith("unix:"):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


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
    if not 1 <= int(number) <= 65535:
        raise ValueError(f"{text!r} has port {number}; ports are from 1 to 65535")
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
