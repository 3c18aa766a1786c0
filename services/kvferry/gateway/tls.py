"""The gateway's certificate, from files that may be renewed while it serves: new connections get the new one."""

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvferry.core.errors import UsageError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Certificate:
    """A certificate chain and its key, PEM, as a Secret of type kubernetes.io/tls holds them."""

    chain: Path
    key: Path
    context: ssl.SSLContext = field(init=False)
    """For HTTP."""
    _seen: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Read both.

        Raises:
            UsageError: they cannot be read, or do not belong together.
        """
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._seen = self._times()
            self.context.load_cert_chain(self.chain, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"no TLS with {self.chain} and {self.key}: {error}", field="tls_cert_file") from error

    def renew(self) -> bool:
        """Read the files again if they have changed; whether they had. Bad ones are left for the next look."""
        try:
            times = self._times()
            if times == self._seen:
                return False
            self.context.load_cert_chain(self.chain, self.key)
        except (OSError, ssl.SSLError) as error:
            _log.warning("the renewed certificate is not used: %s", error)
            return False
        self._seen = times
        _log.info("the certificate was renewed")
        return True

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For gRPC; asks for a renewed certificate at each new connection."""
        given = [self._seen]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            if given[0] == self._seen:
                return None
            given[0] = self._seen
            return self._configuration()

        # The stubs do not know that `None` means: as before.
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch)  # type: ignore[arg-type]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key.read_bytes(), self.chain.read_bytes())])

    def _times(self) -> tuple[int, int]:
        return self.chain.stat().st_mtime_ns, self.key.stat().st_mtime_ns
