"""The gateway's certificate, read from files that may be renewed at run time; new connections use the renewed
certificate."""

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvferry.core.errors import UsageError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Certificate:
    """A certificate chain and its private key, PEM files as in a Secret of type kubernetes.io/tls."""

    chain: Path
    key: Path
    context: ssl.SSLContext = field(init=False)
    """TLS context of the HTTP server."""
    _seen: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Read the chain and the key.

        Raises:
            UsageError: the files cannot be read, or the key does not match the chain.
        """
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._seen = self._times()
            self.context.load_cert_chain(self.chain, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"cannot load {self.chain} with key {self.key}: {error}", field="tls_cert_file") from error

    def renew(self) -> bool:
        """Reload the files if they have changed; return whether the certificate was renewed. Invalid files are retried
        at the next call."""
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
        """Create gRPC server credentials that use the current certificate for each new connection."""
        given = [self._seen]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            if given[0] == self._seen:
                return None
            given[0] = self._seen
            return self._configuration()

        # The type stubs lack `None`, which keeps the previous certificate.
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch)  # type: ignore[arg-type]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key.read_bytes(), self.chain.read_bytes())])

    def _times(self) -> tuple[int, int]:
        return self.chain.stat().st_mtime_ns, self.key.stat().st_mtime_ns
