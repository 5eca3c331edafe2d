"""The line that somebody types to call a server, and where its HTTP is.

Knows: settings, how this program was called. Does not know: servers.
"""

import shlex
import sys
from pathlib import Path

from quill.export.precisions import Family
from quill.server.addresses import reachable, write_address
from quill.server.settings import Settings

_WORDS: dict[Family, tuple[str, str]] = {
    "causal": ("generate", "Once upon a time"),
    "seq2seq": ("generate", "Restart the server"),
    "encoder": ("embed", "The state of the union"),
}


def http_url(settings: Settings, port: int, path: str = "") -> str:
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://{write_address(reachable(settings.host), port)}{path}"


def line_to_type(settings: Settings, port: int, family: Family) -> str:
    """On this machine, as it is but for the names of files."""
    # Some shells take brackets for a pattern.
    address = shlex.quote(write_address(reachable(settings.host), port))
    command, text = _WORDS[family]
    return " ".join(
        [quill_command(), command, "--address", address, *access_options(settings), f'"{text}"']
    )


def access_options(settings: Settings) -> list[str]:
    """What a command must be given to be let in."""
    needed = []
    if settings.tls is not None:
        needed += ["--ca", "CA.pem"]
        if settings.tls.client_ca is not None:
            needed += ["--cert", "CLIENT.pem", "--key", "CLIENT.key"]
    if settings.api_keys is not None:
        needed += ["--api-key-file", "FILE"]
    return needed


def quill_command() -> str:
    """How this very program was called, so that the line can be typed as it is."""
    called = Path(sys.argv[0])
    return sys.argv[0] if called.stem == "quill" and called.suffix == "" else "quill"
