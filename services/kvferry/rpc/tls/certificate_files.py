"""Reads the certificate, the key and the CA bundle of a process from files, and checks them by a handshake.

The check is an in-memory TLS handshake of the process with itself, so that exactly the TLS library's rules apply:
validity, signatures, the name, the purposes, and whether the key belongs to the certificate.
"""

import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.authority import WORKER_NAME

_MAX_FILE_BYTES = 1 << 20
_MAX_READS = 3
_ROUNDS = 8
"""Maximum number of flights of a handshake; TLS 1.3 takes two."""
Times = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of the three files, all PEM."""

    chain: Path
    """The process's certificate, then intermediate ones."""
    key: Path
    """The certificate's private key, not encrypted."""
    ca: Path
    """Certificates of one or more CAs; a peer's certificate must be signed by one of them."""

    def times(self) -> Times:
        """Return the modification times of the files in nanoseconds.

        Raises:
            OSError: a file does not exist.
        """
        return times_of((self.chain, self.key, self.ca))


@dataclass(frozen=True, slots=True)
class Credentials:
    """Content of the three files, checked, and the certificate's fields."""

    chain: bytes
    key: bytes = field(repr=False)
    ca: bytes
    not_after: float
    """End of the certificate's validity, wall-clock seconds since the epoch."""
    times: Times
    """Modification times of the files."""


def times_of(files: Iterable[Path]) -> Times:
    """Return the modification times of files in nanoseconds.

    Raises:
        OSError: a file does not exist.
    """
    return tuple(path.stat().st_mtime_ns for path in files)


def read_credentials(files: CertificateFiles, *, is_worker: bool) -> Credentials:
    """Read and check the files.

    Args:
        files: paths of the certificate chain, the private key and the CA bundle.
        is_worker: whether the process is a worker, whose certificate must contain the name `WORKER_NAME`.

    Raises:
        UsageError: a file cannot be read, or the certificate would be refused; the message names the file and the
            cause, `field` the setting.
    """
    for _ in range(_MAX_READS):
        times = _times(files)
        chain = _read(files.chain, "pool_tls_cert_file")
        key = _read(files.key, "pool_tls_key_file")
        ca = _read(files.ca, "pool_tls_ca_file")
        not_after = _check(files, is_worker=is_worker)
        if _times(files) == times:  # otherwise the files were renewed meanwhile
            return Credentials(chain, key, ca, not_after, times)
    raise UsageError(
        f"{files.chain} changed during every attempt to read it; start again when its files are complete",
        field="pool_tls_cert_file",
    )


def client_context(files: CertificateFiles) -> ssl.SSLContext:
    """Return a context that verifies a worker's certificate and presents the process's own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, files)
    context.set_alpn_protocols(["h2"])
    return context


def leaf_not_after(chain: Path, key: Path) -> float:
    """Return the end of a server certificate's validity, wall-clock seconds since the epoch. The certificate need not
    be signed by a known CA.

    Args:
        chain: PEM file with the certificate and, after it, those of its issuers.
        key: PEM file with its private key, not encrypted.

    Raises:
        ssl.SSLCertVerificationError: the certificate is not valid now, or not for servers.
        ssl.SSLError: the files are not a PEM certificate and its key.
        OSError: a file cannot be read.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, key, password=lambda: "")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a trusted certificate need not be a root CA
    client.load_verify_locations(chain)
    _, calling = _shake_hands(server, client)
    return _end_of(calling.getpeercert())


def cause_of(error: ssl.SSLCertVerificationError) -> str:
    """Return why a certificate was refused, as the end of a sentence about it: `has expired`."""
    match error.verify_code:
        case 10:
            return "has expired"
        case 9:
            return "is not valid yet; compare the clocks of the machines"
        case 62:
            return f"does not have the name {WORKER_NAME}, which workers need"
        case 18 | 19 | 20 | 21:
            return "is not signed by a CA of the bundle"
        case 26:
            return "does not allow this purpose (extended key usage: servers and clients)"
    return f"is refused: {error.verify_message}"


def _check(files: CertificateFiles, *, is_worker: bool) -> float:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(server, files)
    server.verify_mode = ssl.CERT_REQUIRED
    client = client_context(files)
    if not is_worker:  # its certificate is for clients only
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
    try:
        serving, _ = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the certificate in {files.chain} {cause_of(error)} ({files.ca})", field="pool_tls_cert_file"
        ) from error
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"the certificate in {files.chain} cannot be used: {error}", field="pool_tls_cert_file") from (
            error
        )
    return _end_of(serving.getpeercert())


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Perform a handshake between a server and a client with these contexts in memory; return both."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server, server_hostname=WORKER_NAME)
    for _ in range(_ROUNDS):
        for side in (calling, serving):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return serving, calling


def _end_of(shown: Mapping[str, object] | None) -> float:
    return float(ssl.cert_time_to_seconds(str((shown or {})["notAfter"])))


def _load(context: ssl.SSLContext, files: CertificateFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.chain, files.key, password=lambda: "")
    except ssl.SSLError as error:
        what = (
            f"the key in {files.key} does not belong to the certificate in {files.chain}"
            if error.reason == "KEY_VALUES_MISMATCH"
            else f"cannot load {files.chain} and {files.key}: expected a PEM certificate and its unencrypted PEM key: "
            f"{error}"
        )
        raise UsageError(what, field="pool_tls_cert_file") from error
    except OSError as error:
        raise UsageError(
            f"cannot read {files.chain} or {files.key}: {error.strerror}", field="pool_tls_cert_file"
        ) from error
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"cannot load a PEM CA certificate from {files.ca}: {error}", field="pool_tls_ca_file"
        ) from error


def _read(path: Path, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", field=field) from error
    if len(content) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; expected a PEM file", field=field)
    return content


def _times(files: CertificateFiles) -> Times:
    try:
        return files.times()
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}", field="pool_tls_cert_file") from error
