"""A client's TLS certificates and API key, and the channels that use them.

Knows: TLS and API keys from the client's side, channels. Does not know: calls, HTTP.
"""

import argparse
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from quill.server.addresses import DIRECTLY, is_loopback
from quill.server.errors import ServerError

Metadata = tuple[tuple[str, str], ...]
ChannelOptions = tuple[tuple[str, Any], ...]
CHANNEL_OPTIONS: ChannelOptions = (
    # Responses with many logprobs are larger than gRPC's default limit of 4 MB.
    ("grpc.max_receive_message_length", -1),
    # A server that comes back is found soon: gRPC's own backoff grows to two minutes, and it waits
    # 20 s for a machine that doesn't respond.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),
)


class AccessError(ServerError):
    """The client's certificates or its API key can't be used."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """By default plaintext and without an API key. Certificates are in PEM."""

    tls: bool = False  # with this machine's authorities, if `ca` isn't given
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    insecure: bool = False  # allows to send the API key to another machine without TLS

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise AccessError("a certificate needs its key, and a key its certificate: give both")
        if self.api_key is not None and not _is_token(self.api_key):
            raise AccessError("the API key has characters that no key has. Is it the right file?")

    def credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """None: plaintext."""
        if self.uses_tls:
            return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        host = address.rpartition(":")[0]
        if self.api_key is not None and not self.may_show_key(host):
            raise AccessError(
                f"without TLS the API key could be read on its way to {host}. Give --tls or --ca, "
                "or --insecure if the network is trusted"
            )
        return None

    def may_show_key(self, host: str) -> bool:
        """Without TLS."""
        return self.insecure or is_loopback(host)

    def channel(self, address: str, options: ChannelOptions = CHANNEL_OPTIONS) -> grpc.Channel:
        channel: grpc.Channel = self._channel(grpc, address, options)
        return channel

    def async_channel(
        self, address: str, options: ChannelOptions = CHANNEL_OPTIONS
    ) -> grpc.aio.Channel:
        channel: grpc.aio.Channel = self._channel(grpc.aio, address, options)
        return channel

    def _channel(self, api: Any, address: str, options: ChannelOptions) -> Any:
        credentials = self.credentials(address)
        if is_loopback(address.rpartition(":")[0]):
            options = (*options, *DIRECTLY)
        if credentials is None:
            return api.insecure_channel(address, options=options)
        return api.secure_channel(address, credentials, options=options)

    def http_context(self) -> ssl.SSLContext:
        """The same authority and certificate for HTTPS."""
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
    def metadata(self) -> Metadata:
        if self.api_key is None:
            return ()
        return (("authorization", f"Bearer {self.api_key}"),)


def read_access(args: argparse.Namespace) -> Access:
    """From the command line. The API key isn't an argument, which `ps` would show."""
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
