"""The gateway's certificate, read from files that may be renewed at run time; new connections use the renewed
certificate."""

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.certificate_files import Times, cause_of, leaf_not_after, times_of

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Certificate:
    """A certificate chain and its private key, PEM files as in a Secret of type kubernetes.io/tls, and optionally the
    CA of the clients' certificates."""

    chain: Path
    key: Path
    client_ca: Path | None = None
    """PEM file with the CAs of clients; if set, a connection needs a certificate signed by one of them."""
    context: ssl.SSLContext = field(init=False)
    """TLS context of the HTTP server."""
    not_after: float = field(init=False)
    """End of the certificate's validity, wall-clock seconds since the epoch."""
    _current: ssl.SSLContext = field(init=False)
    _seen: Times = field(init=False)

    def __post_init__(self) -> None:
        """Read the files.

        Raises:
            UsageError: the files cannot be read, the key does not match the chain, or the certificate is not valid now.
        """
        try:
            self._seen = self._times()
            self.not_after, self._current = self._read()
        except ssl.SSLCertVerificationError as error:
            raise UsageError(f"the certificate in {self.chain} {cause_of(error)}", field="tls_cert_file") from error
        except (OSError, ssl.SSLError, ValueError) as error:
            raise UsageError(f"cannot load {self.chain} with key {self.key}: {error}", field="tls_cert_file") from error
        self.context = self._read()[1]
        self.context.sni_callback = self._use_current

    def renew(self) -> bool:
        """Reload the files if they have changed; return whether the certificate was renewed. Invalid files are retried
        at the next call."""
        try:
            times = self._times()
            if times == self._seen:
                return False
            self.not_after, self._current = self._read()
        except (OSError, ssl.SSLError, ValueError, UsageError) as error:
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

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            fetch,  # type: ignore[arg-type]  # the type stubs lack `None`, which keeps the previous certificate
            require_client_authentication=self.client_ca is not None,
        )

    def _use_current(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Use the renewed files for a new connection: OpenSSL calls this at each ClientHello. A server's context cannot
        unload CAs, so a renewal creates a new context."""
        connection.context = self._current

    def _read(self) -> tuple[float, ssl.SSLContext]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.chain, self.key, password=lambda: "")
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session is not verified again, so a removed CA would still be accepted.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return leaf_not_after(self.chain, self.key), context

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.chain.read_bytes())],
            None if self.client_ca is None else self.client_ca.read_bytes(),
        )

    def _times(self) -> Times:
        return times_of((self.chain, self.key, *(() if self.client_ca is None else (self.client_ca,))))
