"""How a client knows the server and proves who it is.

Knows: TLS and API keys from the client's side, channels. Does not know: calls, HTTP.
"""

import argparse
import os
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from quill.server.addresses import DIRECTLY, is_loopback
from quill.server.errors import ServerError


class AccessError(ServerError):
    """What a client was given to prove itself with can't be used."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """As it stands: in the clear, and nobody in particular. Certificates are in PEM."""

    tls: bool = False  # by the machine's own authorities, if `ca` isn't given
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False  # allows to send an API key to another machine in the clear

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise AccessError("a certificate needs its key, and a key its certificate: give both")
        if self.api_key is not None and not _is_token(self.api_key):
            raise AccessError("the API key has characters that no key has. Is it the right file?")

    def credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """None: in the clear."""
        if self.uses_tls:
            return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        host = address.rpartition(":")[0]
        if self.api_key is not None and not self.may_show_key(host):
            raise AccessError(
                f"without TLS everybody on the way to {host} could read the API key. Give --tls or "
                "--ca, or --insecure if the way is safe"
            )
        return None

    def may_show_key(self, host: str) -> bool:
        """In the clear."""
        return self.insecure or is_loopback(host)

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        credentials = self.credentials(address)
        options = options_to(address, options)
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def http_context(self) -> ssl.SSLContext:
        """The same authority and certificate, for HTTPS."""
        authority = None if self.ca is None else self.ca.decode("ascii", "ignore")
        context = ssl.create_default_context(cadata=authority)
        if self.cert is not None and self.key is not None:
            with tempfile.NamedTemporaryFile() as file:  # ssl reads files only; nobody else may
                file.write(self.cert + b"\n" + self.key)
                file.flush()
                context.load_cert_chain(file.name)
        return context

    @property
    def uses_tls(self) -> bool:
        return self.tls or self.ca is not None or self.cert is not None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        if self.api_key is None:
            return ()
        return (("authorization", f"Bearer {self.api_key}"),)


def options_to(address: str, options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    is_here = is_loopback(address.rpartition(":")[0])
    return [*options, *DIRECTLY] if is_here else [*options]


def read_access(args: argparse.Namespace) -> Access:
    """From the command line. The API key comes from a file or $QUILL_API_KEY: `ps` shows words."""
    return Access(
        tls=args.tls,
        ca=_read(args.ca),
        cert=_read(args.cert),
        key=_read(args.key),
        api_key=_api_key(args.api_key_file),
        insecure=args.insecure,
    )


def _api_key(path: Path | str | None) -> str | None:
    content = _read(path)
    if content is not None:
        return content.decode("utf-8", "replace").strip()
    return os.environ.get("QUILL_API_KEY") or None


def _read(path: Path | str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise AccessError(f"can't read {path}: {error.strerror}") from error


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and bool(text) and " " not in text


# Answers with many logprobs are larger than gRPC's default limit of 4 MB.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1),)


def open_channel(address: str, access: Access) -> grpc.Channel:
    return access.channel(address, CHANNEL_OPTIONS)
