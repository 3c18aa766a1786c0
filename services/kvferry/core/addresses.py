"""Addresses `host:port` on which a process listens."""

from kvferry.core.errors import UsageError

_MAX_PORT = 0xFFFF
FORM = "host:port, for example 127.0.0.1:8000 or [::1]:8000 (port 0 selects a free port)"


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port of an address.

    Raises:
        ValueError: it is not `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > _MAX_PORT:
        raise ValueError(f"must be {FORM}")
    return host.strip("[]"), int(port)


def listen_address(address: str, field: str) -> tuple[str, int]:
    """Return host, without brackets, and port of an address.

    Args:
        address: `host:port`.
        field: name of the setting, for error messages.

    Raises:
        UsageError: it is not `host:port`.
    """
    try:
        return split_address(address)
    except ValueError as error:
        raise UsageError(f"{field} {address!r} {error}", field=field) from None


def join_address(host: str, port: int) -> str:
    """Return the address of a host and a port; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
