"""Whether a server may be reached from other machines as it was set up.

Knows: addresses, what protects a server. Does not know: how it is protected.
"""

import ipaddress

from server.errors import StartError
from server.settings import Settings


def check_exposure(settings: Settings) -> None:
    """Refuses to serve other machines in the clear, or whoever they are, unless told to."""
    if is_loopback(settings.host) or settings.insecure:
        return
    if settings.tls is None:
        raise StartError(
            f"--host {settings.host} can be reached from other machines, and without --tls-cert "
            "and --tls-key everybody on the way reads along. Give them, or --insecure if something "
            "in front of this server sees to it"
        )
    if settings.api_keys is None and settings.tls.client_ca is None:
        raise StartError(
            f"--host {settings.host} can be reached from other machines, and without --api-keys or "
            "--client-ca anybody may call. Give one, or --insecure if something in front of this "
            "server sees to it"
        )


def is_loopback(host: str) -> bool:
    """Names other than localhost may mean anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
