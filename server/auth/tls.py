"""The server's certificate, and whose certificates it accepts.

Knows: PEM files, how gRPC and Python's ssl want them. Does not know: API keys, ports.

gRPC asks for the certificate before each handshake. So a new one serves the next connection, and
connections that stand, with their streams, aren't touched.
"""

import _ssl  # the standard library has no other way to read a certificate's dates
import logging
import ssl
import stat
from dataclasses import dataclass

import grpc

from quill.server.auth.watched_file import Watched
from quill.server.errors import StartError
from quill.server.settings import TlsFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pem:
    cert: bytes
    key: bytes
    client_ca: bytes | None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Follows the files as they change."""
    watched = Watched(files.paths, lambda: _read(files))

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pem = watched.changed()
        return None if pem is None else _configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(watched.get()),
        fetch,  # type: ignore[arg-type]  # the stub forgets None: no change
        require_client_authentication=files.client_ca is not None,
    )


def http_context(files: TlsFiles) -> Watched[ssl.SSLContext]:
    """The same for an HTTP server. A context stays with the connections that it was made for."""
    return Watched(files.paths, lambda: _context(files))


def certificate_expiry(files: TlsFiles) -> Watched[float]:
    """When the certificate that is served expires, in Unix time."""

    def read() -> float:
        _context(files)  # one that can't be used isn't served
        found = _ssl._test_decode_cert(files.cert)  # type: ignore[attr-defined]
        return ssl.cert_time_to_seconds(found["notAfter"])

    return Watched(files.paths, read)


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.client_ca)


def _read(files: TlsFiles) -> _Pem:
    _context(files)
    if files.key.stat().st_mode & stat.S_IROTH:
        logger.warning("every user of this machine can read %s: chmod o-r %s", *[files.key] * 2)
    client_ca = None if files.client_ca is None else files.client_ca.read_bytes()
    return _Pem(files.cert.read_bytes(), files.key.read_bytes(), client_ca)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """gRPC would take any bytes and fail at every handshake; Python's ssl looks at them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, _no_password)
    except (OSError, ValueError) as error:
        raise StartError(
            f"can't use the certificate {files.cert} with the key {files.key}: {error}. Both must "
            "be PEM files, without a password, and belong together"
        ) from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise StartError(f"can't use --client-ca {files.client_ca}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")
