"""TLS of a client to its gateway: the CAs that it trusts, and its own certificate if the gateway requires one."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files for a client's TLS, all PEM. If none is set, the CAs of gRPC's package are trusted.

    Example:
        Client("chat.example:9000", tls=ClientTls(ca_file="ca.crt", cert_file="me.crt", key_file="me.key"))
    """

    ca_file: str | Path = ""
    """CAs that may have signed the gateway's certificate; empty for the CAs of gRPC's package."""
    cert_file: str | Path = ""
    """Certificate chain of this client, for a gateway with `--tls-client-ca-file`."""
    key_file: str | Path = ""
    """Private key of that certificate."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            UsageError: a file cannot be read, or only one of certificate and key is set.
        """
        if bool(self.cert_file) != bool(self.key_file):
            missing = "key_file" if self.cert_file else "cert_file"
            raise UsageError(f"a client's certificate needs its key; set {missing} too", field=missing)
        ca, key, chain = (
            _read(path, name)
            for name, path in (("ca_file", self.ca_file), ("key_file", self.key_file), ("cert_file", self.cert_file))
        )
        return grpc.ssl_channel_credentials(ca, key, chain)


def _read(path: str | Path, field: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", field=field) from error
