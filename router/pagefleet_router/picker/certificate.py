"""A certificate of our own making: gateways encrypt what they ask an endpoint picker, whoever it says it is."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAME = "pagefleet-endpoint-picker"
_VALID = datetime.timedelta(days=3650)
_CLOCKS_APART = datetime.timedelta(days=1)


def self_signed() -> tuple[bytes, bytes]:
    """Return a new key and its certificate for NAME, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), certificate.public_bytes(pem)
