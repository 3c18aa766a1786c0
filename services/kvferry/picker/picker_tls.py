"""The certificate of a picker: from files that may be renewed, or self-signed, as gateways expect by default.

Envoy Gateway, Istio and kgateway connect to endpoint pickers with TLS and do not verify the certificate.
"""

from collections.abc import Callable

import grpc

from kvferry.core.clock import Clock
from kvferry.gateway.http.server.tls import Certificate
from kvferry.picker.config import PickerConfig
from kvferry.rpc.tls.authority import Authority

_DAYS = 3650
_NAME = "kvferry-picker"


def picker_credentials(
    config: PickerConfig, clock: Clock
) -> tuple[Callable[[], grpc.ServerCredentials] | None, Certificate | None]:
    """Return what makes the server's credentials, `None` without TLS, and the certificate if it is from files.

    Args:
        config: all settings.
        clock: its wall time begins the validity of a self-signed certificate.

    Raises:
        UsageError: the files cannot be used, or the package `cryptography` is not installed.
    """
    if config.is_plaintext:
        return None, None
    if config.tls is not None:
        certificate = Certificate(*config.tls)
        return certificate.grpc_credentials, certificate
    authority = Authority.draw(clock.wall(), _DAYS, title=_NAME)
    signed = authority.sign(_NAME, clock.wall(), _DAYS)
    pair = (signed.key.encode(), (signed.certificate + authority.certificate).encode())
    return lambda: grpc.ssl_server_credentials([pair]), None
