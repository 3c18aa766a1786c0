"""Determines why a connection to a worker fails, by a handshake with Python's TLS, whose errors name the cause.

gRPC reports `Socket closed` if the other side refuses a certificate, and otherwise only its library's error numbers.
"""

import socket
import ssl
from contextlib import suppress

from kvferry.core.errors import UsageError
from kvferry.rpc.tls.authority import WORKER_NAME
from kvferry.rpc.tls.certificate_files import CertificateFiles, cause_of, client_context, read_credentials

_SECONDS = 2.0
_SIGNS = ("handshake", "verification", "socket closed", "reset", "recvmsg", "broken pipe")
"""Substrings of gRPC's error messages for which TLS may be the cause."""


def may_be_tls(details: str) -> bool:
    """Return whether TLS may be the cause of a failed connection, judging by gRPC's message."""
    lower = details.lower()
    return any(sign in lower for sign in _SIGNS)


def refusal_cause(address: str, files: CertificateFiles | None) -> str:
    """Connect to `address` and return why TLS fails; empty if it does not, or the cause is a different one. Blocks for
    at most a few seconds.

    Args:
        address: `host:port` of a worker's server.
        files: files of this process; `None` without pool TLS.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as connection:
            connection.settimeout(_SECONDS)
            return _plain_cause(connection) if files is None else _cause(connection, files)
    except (OSError, ValueError, OverflowError):
        return ""


def _cause(connection: socket.socket, files: CertificateFiles) -> str:
    try:
        context = client_context(files)
    except UsageError as error:
        return error.message
    try:
        with context.wrap_socket(connection, server_hostname=WORKER_NAME) as secured:
            # In TLS 1.3 the client's handshake ends before the server has verified the client certificate, so a refusal
            # shows only at the first read.
            with suppress(TimeoutError):
                if secured.recv(1) == b"":
                    return _not_accepted("it closed the connection", files)
            return ""
    except ssl.SSLCertVerificationError as error:
        return f"its certificate {cause_of(error)}"
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).upper()
        if "ALERT" in reason:
            alert = reason.partition("ALERT_")[2].replace("_", " ").lower() or reason.lower()
            return _not_accepted(alert, files)
        if reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}:
            return "it does not use TLS; set its --pool-tls files too"
        return f"the TLS handshake fails: {error.reason or error}"
    except ConnectionError:
        return _not_accepted("it closed the connection", files)


def _not_accepted(why: str, files: CertificateFiles) -> str:
    with suppress(OSError):
        try:
            read_credentials(files, is_worker=False)
        except UsageError as error:
            why = error.message
    return f"it does not accept the certificate of this process: {why}"


def _plain_cause(connection: socket.socket) -> str:
    """Return why plain gRPC fails: whether the server uses TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection):
            return "it requires TLS; set --pool-tls-cert-file, --pool-tls-key-file and --pool-tls-ca-file"
    except (ssl.SSLError, OSError):
        return ""
