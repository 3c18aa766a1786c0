"""TLS between the processes of a pool: credentials for gRPC servers and channels, renewed with their files.

Both sides present a certificate of the pool's CA. A server uses renewed files for each new connection. A channel keeps
the certificate with which it was opened; a changed `generation` means that its owner must open a new channel. Existing
connections and calls are not affected by a renewal.
"""

import asyncio
import logging
import threading

import grpc

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.authority import WORKER_NAME
from kvferry.rpc.tls.certificate_files import CertificateFiles, Credentials, read_credentials

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0
"""Interval in seconds between checks for renewed files."""


class PoolTls:
    """The certificate, key and CA bundle of this process. Thread-safe."""

    channel_options = (("grpc.ssl_target_name_override", WORKER_NAME),)
    """Options of a channel to a worker: verify the name in its certificate instead of the address that is dialed."""

    def __init__(self, files: CertificateFiles, *, is_worker: bool) -> None:
        """
        Args:
            files: paths of the certificate chain, the private key and the CA bundle.
            is_worker: whether this process is a worker, whose certificate must contain the name `WORKER_NAME`.

        Raises:
            UsageError: the files cannot be read, or peers would refuse the certificate.
        """
        self.files = files
        self.generation = 0
        """Number of renewals."""
        self._is_worker = is_worker
        self._lock = threading.Lock()
        self._current = read_credentials(files, is_worker=is_worker)
        self._why_not = ""

    @property
    def not_after(self) -> float:
        """End of the certificate's validity, wall-clock seconds since the epoch."""
        return self._current.not_after

    def renew(self) -> bool:
        """Read the files again if they have changed; return whether they were read. Invalid files are logged and tried
        again at the next call; until then, the earlier ones stay in use."""
        try:
            if self.files.times() == self._current.times:
                return False
            found = read_credentials(self.files, is_worker=self._is_worker)
        except (UsageError, OSError) as error:
            why_not = error.message if isinstance(error, UsageError) else f"{error.filename}: {error.strerror}"
            if why_not != self._why_not:
                _log.warning("the renewed certificate of the pool is not used: %s", why_not)
            self._why_not = why_not
            return False
        with self._lock:
            self._current, self.generation, self._why_not = found, self.generation + 1, ""
        _log.info("the certificate of the pool was renewed")
        return True

    async def follow(self) -> None:
        """Read the files again whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self.renew()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Create credentials of a server that demands a certificate of the pool's CA from each client, and uses the
        current files for each new connection."""
        given = [self._snapshot()[0]]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            generation, current = self._snapshot()
            if generation == given[0]:
                return None
            given[0] = generation
            return _configuration(current)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._current),
            fetch,  # type: ignore[arg-type]  # the type stubs lack `None`, which keeps the previous certificate
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Create credentials of a channel, with the current files."""
        _, current = self._snapshot()
        return grpc.ssl_channel_credentials(current.ca, current.key, current.chain)

    def _snapshot(self) -> tuple[int, Credentials]:
        with self._lock:
            return self.generation, self._current


def _configuration(current: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(current.key, current.chain)], current.ca)
