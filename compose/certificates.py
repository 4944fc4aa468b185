"""An authority of a folder's own, and certificates that it signs for the servers of one deployment.

The only module that needs the package ``cryptography``: imported where certificates are made.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from compose.errors import StackRefused
from compose.server_conf import CA_CERT, CA_KEY

AUTHORITY_DAYS = 3650
_CLOCKS_APART = timedelta(hours=1)
"""A server whose clock is behind by less takes a new certificate."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: str
    key: str


class Authority:
    """Signs. Its key is in the folder only, and no server or service needs it."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @property
    def pem(self) -> Issued:
        """Its own."""
        return Issued(_pem(self._certificate), _key_pem(self._key))

    def issue(self, name: str, hosts: Sequence[str], *, valid: timedelta, also_client: bool = False) -> Issued:
        """A certificate for a server that is reached by ``hosts``, names or addresses. ``also_client``: the server
        shows it to others of its kind, too, when it connects to them."""
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        until = min(now + valid, self._certificate.not_valid_after_utc)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] + [ExtendedKeyUsageOID.CLIENT_AUTH] * also_client
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name(name), self._certificate.subject, key, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(_pem(certificate), _key_pem(key))


def make_authority() -> Authority:
    """A new one, which nobody trusts yet."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("BlitzScale")
    certificate = (
        _builder(name, name, key, datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def read_authority(folder: Path, signed: Path) -> Authority | None:
    """That of a folder; None if it has none. ``signed``: where certificates go that it signs, once they are made.

    Raises ``StackRefused`` for one that can sign nothing that is trusted, or that is lost.
    """
    paths = folder / CA_CERT, folder / CA_KEY
    if not paths[0].exists():
        if signed.exists():
            raise _unusable(f"{paths[0]} is lost, by which services trust the servers: put it back from a Secret")
        # The certificate is written after the key, and before anything that it signs: a key alone has signed nothing.
        return None
    try:
        certificate = x509.load_pem_x509_certificate(paths[0].read_bytes())
        key = serialization.load_pem_private_key(paths[1].read_bytes(), password=None)
    except OSError as error:
        raise _unusable(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise _unusable(f"{paths[0]} and {CA_KEY} cannot be understood: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise _unusable(f"{paths[1]} is not the key of {CA_CERT}")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise _unusable(f"{paths[0]} was valid until {certificate.not_valid_after_utc:%Y-%m-%d}")
    return Authority(certificate, key)


def _unusable(why: str) -> StackRefused:
    return StackRefused(f"{why}. --renew makes another authority, whom all servers and services must then be told of")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCKS_APART)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()
