"""Writes the CA, the certificates and the keys of a pool to a folder, for processes that read them from files."""

import os
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.authority import NAMES, Authority
from kvferry.rpc.tls.certificate_files import CertificateFiles

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
_MAX_FILE_BYTES = 1 << 20


def files_in(folder: Path, kind: str) -> CertificateFiles:
    """Return the files of a process in `folder`.

    Args:
        folder: folder with the files of all processes of the pool.
        kind: `worker` or `gateway`.
    """
    return CertificateFiles(folder / f"{kind}.crt", folder / f"{kind}.key", folder / CA_CERTIFICATE)


def write_ca(folder: Path, authority: Authority) -> None:
    """Write the certificate and the key of a new CA.

    Args:
        folder: folder of the files, which is created if it is missing.
        authority: the new CA.

    Raises:
        UsageError: the folder already has a CA, or cannot be written.
    """
    if (folder / CA_KEY).exists() or (folder / CA_CERTIFICATE).exists():
        raise UsageError(
            f"{folder} already has a CA; remove {CA_CERTIFICATE} and {CA_KEY}, or use another folder", field="folder"
        )
    _write(folder / CA_KEY, authority.key, 0o600)
    _write(folder / CA_CERTIFICATE, authority.certificate, 0o644)


def read_ca(folder: Path) -> Authority:
    """Read the CA that `write_ca` wrote.

    Raises:
        UsageError: a file cannot be read.
    """
    return Authority(_read(folder / CA_CERTIFICATE), _read(folder / CA_KEY))


def write_certificate(folder: Path, kind: str, authority: Authority, now: float, days: float) -> CertificateFiles:
    """Sign a certificate for one kind of process and write it with its key. Existing files are replaced atomically, so
    that a process never reads a partial file.

    Args:
        folder: existing folder for the files.
        kind: `worker` or `gateway`.
        authority: CA that signs.
        now: wall-clock time in seconds since the epoch.
        days: validity in days.

    Raises:
        UsageError: the CA cannot sign, or the folder cannot be written.
    """
    signed = authority.sign(NAMES[kind], now, days)
    files = files_in(folder, kind)
    _write(files.key, signed.key, 0o600)
    _write(files.chain, signed.certificate, 0o644)
    return files


def write_pool(folder: Path, now: float, days: float) -> dict[str, CertificateFiles]:
    """Create a CA whose key is not stored, and write its certificate and the certificates of workers and gateways.

    Args:
        folder: folder of the files, which is created if it is missing.
        now: wall-clock seconds since the epoch.
        days: validity of the certificates.

    Raises:
        UsageError: the folder cannot be written, or the package `cryptography` is not installed.
    """
    authority = Authority.draw(now, days)
    _write(folder / CA_CERTIFICATE, authority.certificate, 0o644)
    return {kind: write_certificate(folder, kind, authority, now, days) for kind in NAMES}


def _write(path: Path, text: str, mode: int) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            fresh.unlink()
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; use another folder", field="folder") from error


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:_MAX_FILE_BYTES].decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; `kvferry key ca {path.parent}` creates a CA", field="folder"
        ) from error
