"""Certificates of a pool for tests: valid, expired, of another CA, for another name."""

from pathlib import Path

from kvferry.core.clock import SystemClock
from kvferry.rpc.tls.authority import NAMES, Authority
from kvferry.rpc.tls.certificate_files import CertificateFiles

DAY = 86_400.0
NOW = SystemClock().wall()


def an_authority(title: str = "tests") -> Authority:
    """Create a CA that has been valid for 40 days, so that certificates which it signed may have expired."""
    return Authority.draw(NOW - 40 * DAY, 400, title=title)


class PoolFolder:
    """The files of a pool's processes, in one folder for each kind of process."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.folder = folder
        self.worker = self.issue("worker", authority)
        self.gateway = self.issue("gateway", authority)
        self.trust(authority)

    def files(self, kind: str) -> CertificateFiles:
        """Return the paths of a process's files."""
        return CertificateFiles(self.folder / f"{kind}.crt", self.folder / f"{kind}.key", self.folder / "ca.crt")

    def issue(self, kind: str, authority: Authority, *, age_days: float = 0, days: float = 10) -> CertificateFiles:
        """Write a new certificate and key for a kind of process.

        Args:
            age_days: days since it was signed; more than `days` for an expired certificate.
        """
        signed = authority.sign(NAMES[kind], NOW - age_days * DAY, days)
        files = self.files(kind)
        files.key.write_text(signed.key)
        files.chain.write_text(signed.certificate)
        return files

    def trust(self, *authorities: Authority) -> None:
        """Write the CA bundle."""
        (self.folder / "ca.crt").write_text("".join(each.certificate for each in authorities))


def tls_flags(files: CertificateFiles) -> tuple[str, ...]:
    """Return the flags with which a process uses these files."""
    flags = {"cert": files.chain, "key": files.key, "ca": files.ca}
    return tuple(part for name, path in flags.items() for part in (f"--pool-tls-{name}-file", str(path)))
