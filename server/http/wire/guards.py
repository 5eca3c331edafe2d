"""Who may call over HTTP: no page of another site, nobody without a key.

Knows: headers that browsers and attackers send, keys, certificates. Does not know: what is asked.

A page in a browser can reach servers on the same machine that nobody else can. Its requests carry
the page's own address as Origin, or, if it had its name point at this machine, as Host.
"""

from urllib.parse import urlsplit

from quill.server.addresses import is_loopback
from quill.server.auth.caller import ANYBODY, Caller, certified_caller
from quill.server.auth.key_file import Keyring
from quill.server.http.wire.exchange import Exchange
from quill.server.http.wire.refusals import RefusalError

TIMEOUT_HEADER = "x-request-timeout"
_CLOSE = (("connection", "close"),)


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
            raise RefusalError(400, "content-length", reason, _CLOSE)
        host = exchange.header("host") or ""
        if self._is_local and not is_loopback(_name(host)):
            reason = "isn't this machine; the server listens for this machine only"
            raise RefusalError(403, "host", reason)
        for origin in exchange.headers("origin"):
            if origin.partition("://")[2].lower() != host.lower():
                reason = "is another page's; only pages of this server may call it"
                raise RefusalError(403, "origin", reason)

    def caller(self, exchange: Exchange) -> Caller:
        """By its API key; without those, by its certificate, if it had to show one."""
        if self._keyring is not None:
            return self._keyring.identify(exchange.headers("authorization"))
        names = exchange.peer_names
        return certified_caller(names) if names else ANYBODY


def _name(host: str) -> str:
    """Without the port; empty if it makes no sense."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def deadline_s(exchange: Exchange) -> float | None:
    """By the clock of time.monotonic."""
    given = exchange.header(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise RefusalError(400, TIMEOUT_HEADER, "must be a number of seconds above 0")
    return exchange.arrived_s + seconds
