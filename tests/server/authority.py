"""An authority that signs certificates for tests, as real ones are made."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quill.server.client.access import Access
from quill.server.settings import TlsFiles

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Signed:
    cert: bytes
    key: bytes


class Authority:
    """Trusted by whoever is given `cert`."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._name, self._key.public_key())
        signed = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.cert = signed.public_bytes(serialization.Encoding.PEM)

    def sign(self, name: str) -> Signed:
        """For this machine's loopback address."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([address, x509.DNSName("localhost")])
        builder = _builder(_name(name), self._name, key.public_key())
        signed = builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        return Signed(signed.public_bytes(serialization.Encoding.PEM), _pem(key))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def locked(key: bytes, password: bytes) -> bytes:
    """The same key, with a password."""
    opened = serialization.load_pem_private_key(key, None)
    assert isinstance(opened, ec.EllipticCurvePrivateKey)
    return _pem(opened, password)


def write(directory: Path, signed: Signed, client_ca: bytes | None = None) -> TlsFiles:
    """As a tool that renews certificates does: each file beside its place, then renamed."""
    contents = {"cert.pem": signed.cert, "key.pem": signed.key}
    if client_ca is not None:
        contents["clients.pem"] = client_ca
    for name, content in contents.items():
        (directory / f"{name}.new").write_bytes(content)
        (directory / f"{name}.new").rename(directory / name)
    ca = None if client_ca is None else directory / "clients.pem"
    return TlsFiles(cert=directory / "cert.pem", key=directory / "key.pem", client_ca=ca)


def trusting(authority: Authority, own: Signed | None = None) -> Access:
    if own is None:
        return Access(ca=authority.cert)
    return Access(ca=authority.cert, cert=own.cert, key=own.key)
