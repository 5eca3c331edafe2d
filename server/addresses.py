"""How hosts and ports are written, and which machine a host is on. Imports nothing of ours.

Knows: loopback, the brackets around IPv6. Does not know: who listens where.
"""

import ipaddress


def write_address(host: str, port: int) -> str:
    """HOST:PORT, as clients and URLs take it."""
    if ":" in host and not host.startswith("unix:"):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


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
