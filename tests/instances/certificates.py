"""An authority and a certificate for 127.0.0.1 that it signed, for tests with TLS."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def write_certificates(directory: Path) -> None:
    """`ca.crt`, and `etcd.crt` with `etcd.key`, good for both sides of a connection."""
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    constraint = x509.BasicConstraints(ca=True, path_length=None)
    ca = _builder("test-ca", "test-ca", authority.public_key()).add_extension(constraint, critical=True)
    signed = (
        _builder("etcd", "test-ca", key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
    )
    pem = serialization.Encoding.PEM
    (directory / "ca.crt").write_bytes(ca.sign(authority, hashes.SHA256()).public_bytes(pem))
    (directory / "etcd.crt").write_bytes(signed.sign(authority, hashes.SHA256()).public_bytes(pem))
    (directory / "etcd.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
    )
