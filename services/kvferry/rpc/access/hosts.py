"""Hosts of addresses: their syntax, and the IP addresses that belong to them."""

import ipaddress
import re
import socket
from contextlib import suppress

import psutil

_NAME = re.compile(r"[A-Za-z0-9_]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9_])?\.?")
_NUMERIC = re.compile(r"[0-9.]+")
"""Forms of IPv4 addresses that some resolvers accept, but that are not host names."""


def is_host(text: str) -> bool:
    """Return whether `text` is an IP address, with or without brackets, or a host name."""
    return ip_of(text) is not None or (_NAME.fullmatch(text) is not None and not _NUMERIC.fullmatch(text))


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, with or without brackets; `None` for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def addresses_of(host: str) -> set[str]:
    """Return the IP addresses of a host, or of this machine for the wildcard; empty for a name that this machine cannot
    resolve."""
    address = ip_of(host)
    if address is None:
        with suppress(OSError):
            return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)}
        return set()
    if not address.is_unspecified:
        return {str(address)}
    found = {one.address for listed in psutil.net_if_addrs().values() for one in listed}
    return {str(own) for text in found if (own := ip_of(text.partition("%")[0])) is not None}
