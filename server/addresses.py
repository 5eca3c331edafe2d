"""How hosts and ports are written. Imports nothing.

Knows: the brackets around IPv6. Does not know: who listens where.
"""


def write_address(host: str, port: int) -> str:
    """HOST:PORT, as clients and URLs take it."""
    if ":" in host and not host.startswith("unix:"):
        return f"[{host}]:{port}"
    return f"{host}:{port}"
