"""Certificate authority of a pool: generates keys, and signs the certificates of workers and gateways.

    CA  ECDSA P-256, signs certificates only, path length 0
    ├── worker.kvferry     server and client: workers are called by gateways and by each other
    └── gateway.kvferry    client

Workers have no names of their own, and their addresses change with each pod. A certificate therefore names the kind of
process, and callers verify that name and the CA (RFC 9525, 6.3: a DNS name in the subject alternative names). A
gateway's certificate is not accepted as a worker's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

from kvferry.core.errors import UsageError

WORKER_NAME = "worker.kvferry"
"""DNS name in the certificates of workers, which callers verify."""
GATEWAY_NAME = "gateway.kvferry"
"""DNS name in the certificates of gateways and of programs that call workers."""
NAMES: Mapping[str, str] = {"worker": WORKER_NAME, "gateway": GATEWAY_NAME}
"""DNS name by kind of process."""
_EARLY = timedelta(minutes=5)
"""Validity before the time of signing, for machines whose clocks are behind."""
MAX_DAYS = 36_500


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its private key, both PEM."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority: its certificate and private key, both PEM."""

    certificate: str
    key: str = field(repr=False)

    @classmethod
    def draw(cls, now: float, days: float, *, title: str = "kvferry pool") -> "Authority":
        """Generate a new key and a self-signed certificate for it.

        Args:
            now: wall-clock time in seconds since the epoch.
            days: validity in days from `now`.
            title: common name of the certificate; a random suffix makes it unique.

        Raises:
            UsageError: the package `cryptography` is not installed, or `days` is out of range.
        """
        x509, hashes = _module("x509"), _module("hazmat.primitives.hashes")
        key = _new_key()
        serial = x509.random_serial_number()
        name = _named(f"{title} {serial % (1 << 32):08x}")
        # digital_signature, content_commitment, key_encipherment, data_encipherment, key_agreement, key_cert_sign,
        # crl_sign, encipher_only, decipher_only
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        built = (
            _builder(name, name, key.public_key(), serial, now, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(_pem(built.sign(key, hashes.SHA256())), _key_pem(key))

    def sign(self, name: str, now: float, days: float) -> Signed:
        """Generate a key and sign a certificate for `name`, which expires no later than the authority's own
        certificate.

        Args:
            name: DNS name, for example `WORKER_NAME`.
            now: wall-clock time in seconds since the epoch.
            days: validity in days from `now`.

        Raises:
            UsageError: the authority's certificate or key cannot be read, does not match, or has expired; the package
                `cryptography` is not installed, or `days` is out of range.
        """
        x509, hashes = _module("x509"), _module("hazmat.primitives.hashes")
        issuer, issuer_key = self._loaded()
        left = issuer.not_valid_after_utc.timestamp() - now
        if left <= 0:
            raise UsageError(
                f"the CA expired on {_date(issuer.not_valid_after_utc)}; create a new one", field="ca_file"
            )
        key = _new_key()
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        purposes = _module("x509.oid").ExtendedKeyUsageOID
        built = (
            _builder(
                _named(name),
                issuer.subject,
                key.public_key(),
                x509.random_serial_number(),
                now,
                min(_checked(days), left / 86_400),
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([purposes.SERVER_AUTH, purposes.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()),
                critical=False,
            )
        )
        return Signed(_pem(built.sign(issuer_key, hashes.SHA256())), _key_pem(key))

    def _loaded(self) -> tuple[Any, Any]:
        x509, serialization = _module("x509"), _module("hazmat.primitives.serialization")
        try:
            issuer = x509.load_pem_x509_certificate(self.certificate.encode())
            key = serialization.load_pem_private_key(self.key.encode(), password=None)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"the CA's certificate or key cannot be read ({error}); use the two files that `kvferry key ca` wrote",
                field="ca_file",
            ) from error
        if key.public_key() != issuer.public_key():
            raise UsageError("the CA's key does not belong to its certificate", field="ca_key_file")
        return issuer, key


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """Public contents of a certificate."""

    fingerprint: str
    """SHA-256 of the certificate, hexadecimal."""
    issuer: str
    not_before: float
    """Wall-clock seconds since the epoch."""
    not_after: float
    """Wall-clock seconds since the epoch."""
    names: tuple[str, ...]
    """DNS names in the subject alternative names."""


def facts_of(pem: str) -> list[CertificateFacts]:
    """Read the certificates in a PEM string, in order.

    Raises:
        UsageError: the string has no certificate, or a malformed one, or the package `cryptography` is not installed.
    """
    x509, hashes = _module("x509"), _module("hazmat.primitives.hashes")
    try:
        found = x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise UsageError(f"the text has no certificates that can be read: {error}", field="certificate") from error
    return [
        CertificateFacts(
            one.fingerprint(hashes.SHA256()).hex(),
            one.issuer.rfc4514_string(),
            one.not_valid_before_utc.timestamp(),
            one.not_valid_after_utc.timestamp(),
            _dns_names(one),
        )
        for one in found
    ]


def _dns_names(certificate: Any) -> tuple[str, ...]:
    x509 = _module("x509")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.value.get_values_for_type(x509.DNSName))


def _builder(subject: Any, issuer: Any, public_key: Any, serial: int, now: float, days: float) -> Any:
    begins = datetime.fromtimestamp(now, UTC)
    return (
        _module("x509")
        .CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(serial)
        .not_valid_before(begins - _EARLY)
        .not_valid_after(begins + timedelta(days=_checked(days)))
    )


def _checked(days: float) -> float:
    if not 0 < days <= MAX_DAYS:
        raise UsageError(
            f"the validity of a certificate must be more than 0 and at most {MAX_DAYS} days, not {days}", field="days"
        )
    return days


def _new_key() -> Any:
    ec = _module("hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP256R1())


def _named(text: str) -> Any:
    x509 = _module("x509")
    return x509.Name([x509.NameAttribute(_module("x509.oid").NameOID.COMMON_NAME, text)])


def _pem(certificate: Any) -> str:
    encoding = _module("hazmat.primitives.serialization").Encoding.PEM
    return bytes(certificate.public_bytes(encoding)).decode()


def _key_pem(key: Any) -> str:
    serialization = _module("hazmat.primitives.serialization")
    return bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    ).decode()


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _module(name: str) -> Any:
    """Import a module of `cryptography`, which is needed only to create certificates."""
    try:
        return import_module(f"cryptography.{name}")
    except ImportError as error:
        raise UsageError(
            "creating certificates needs the package cryptography, which is not installed; run `pip install "
            "'kvferry[encryption]'`",
            field="pool_tls",
        ) from error
