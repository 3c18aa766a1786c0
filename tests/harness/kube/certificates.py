"""Keys and certificates of a cluster: certificate authority, API server, front proxy for aggregated APIs."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvferry.core.clock import Clock, SystemClock

_DAYS = 30
FRONT_PROXY = "front-proxy-client"
_SERVER_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(slots=True)
class Authority:
    """Certificate authority that signs server and client certificates."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    clock: Clock

    @classmethod
    def make(cls, name: str, clock: Clock | None = None) -> "Authority":
        """Create an authority with a new key."""
        clock = clock or SystemClock()
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        made = (
            _builder(name, name, key, clock)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(key, made.sign(key, hashes.SHA256()), clock)

    @property
    def pem(self) -> bytes:
        """Certificate of the authority, PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def server(self, names: Iterable[str], addresses: Iterable[str], stem: Path) -> None:
        """Create a server certificate and its key, as STEM.crt and STEM.key."""
        hosts: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        hosts += [x509.IPAddress(ip_address(address)) for address in addresses]
        self._sign(stem.name, ExtendedKeyUsageOID.SERVER_AUTH, stem, hosts)

    def client(self, name: str, stem: Path) -> None:
        """Create a client certificate and its key, as STEM.crt and STEM.key."""
        self._sign(name, ExtendedKeyUsageOID.CLIENT_AUTH, stem, [])

    def _sign(self, name: str, purpose: x509.ObjectIdentifier, stem: Path, hosts: list[x509.GeneralName]) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        made = (
            _builder(name, str(issuer), key, self.clock)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
                critical=False,
            )
        )
        if hosts:
            made = made.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        signed = made.sign(self.key, hashes.SHA256())
        stem.with_suffix(".crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        write_key(key, stem.with_suffix(".key"))


def write_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Write a private key to a file that only its owner can read."""
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.touch(0o600)
    path.write_bytes(pem)


def make_all(folder: Path, addresses: Iterable[str], clock: Clock | None = None) -> None:
    """Create the files of a control plane: ca, api, front-proxy-ca, front-proxy, and the key that signs service account
    tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    ca = Authority.make("kvferry-tests", clock)
    (folder / "ca.crt").write_bytes(ca.pem)
    ca.server(_SERVER_NAMES, addresses, folder / "api")
    proxy = Authority.make("kvferry-tests-front-proxy", clock)
    (folder / "front-proxy-ca.crt").write_bytes(proxy.pem)
    proxy.client(FRONT_PROXY, folder / "front-proxy")
    write_key(ec.generate_private_key(ec.SECP256R1()), folder / "accounts.key")


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, clock: Clock) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(clock.wall(), UTC)
    made = x509.CertificateBuilder().subject_name(_named(name)).issuer_name(_named(issuer))
    made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=_DAYS))


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
