"""Who belongs to a pool: from the EndpointSlices of its Services to listings of workers. No I/O.

An operator makes one headless Service per role, labelled with pool and role, that publishes addresses before they are
ready; whether a worker takes requests is its own word. What the slices add is who there is, and who is being stopped.
"""

import ipaddress
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvferry.gateway.config import Endpoint

POOL_LABEL = "kvferry.dev/pool"
ROLE_LABEL = "kvferry.dev/role"
WORK_PORT = "grpc"
ADMIN_PORT = "admin"
MAX_LISTINGS = 2048
"""More than any pool has; what goes beyond is left out, so that a mistake elsewhere does not take our memory."""

_ROLES = {"prefill": "prefill", "decode": "decode", "combined": "both"}
_FAMILIES = ("IPv4", "IPv6")
"""A pod that has an address of each kind is reached over the first of these."""
_MAX_NAME_CHARS = 253


@dataclass(frozen=True, slots=True)
class Listing:
    """Where one worker is, and what for."""

    name: str
    """Of its pod; its address where it has none. Another name at the same address is another worker."""
    role: str
    endpoint: Endpoint
    stopping: bool = False
    """It was told to end: it gets no new requests, running ones go on."""

    @property
    def key(self) -> tuple[str, str, Endpoint]:
        """What makes it the same worker as before."""
        return self.name, self.role, self.endpoint


@dataclass(frozen=True, slots=True)
class News:
    """What a source has to say."""

    listings: tuple[Listing, ...] | None = None
    """Everybody there is; `None`: not known now, so that the last known stay."""
    trouble: str = ""
    """Why it is not known, or may be old; empty: all is well."""


class Source(Protocol):
    """Tells who belongs to the fleet, whenever that changes."""

    def news(self) -> AsyncIterator[News]:
        """Endless; closing the iterator ends whatever it runs."""
        ...


def listings_of(slices: Iterable[Mapping[str, Any]]) -> tuple[Listing, ...]:
    """The workers in EndpointSlice objects, each once, in a fixed order; what cannot be read is left out.

    One pod may be in several slices: while slices are rearranged, and with one slice per IP family. It is stopping when
    any of them says so, since no pod ever stops stopping. Two pods at one address are a pod that ended and its
    successor: the one that is not stopping is meant.
    """
    by_pod: dict[tuple[str, str], tuple[int, Listing]] = {}
    for found in slices:
        for rank, listing in _listings_in(found):
            other = by_pod.get((listing.name, listing.role))
            if other is None:
                if len(by_pod) < MAX_LISTINGS:
                    by_pod[listing.name, listing.role] = rank, listing
                continue
            stopping = listing.stopping or other[1].stopping
            best_rank, best = min(((rank, listing), other), key=lambda one: (one[0], one[1].endpoint.address))
            by_pod[listing.name, listing.role] = best_rank, replace(best, stopping=stopping)
    by_address: dict[str, Listing] = {}
    for _, listing in sorted(by_pod.values(), key=lambda one: (one[1].stopping, one[1].name, one[1].role)):
        by_address.setdefault(listing.endpoint.address, listing)
    return tuple(sorted(by_address.values(), key=lambda listing: (listing.role, listing.name)))


def _listings_in(found: Mapping[str, Any]) -> Iterable[tuple[int, Listing]]:
    role = _ROLES.get(str(_mapping(_mapping(found.get("metadata")).get("labels")).get(ROLE_LABEL)))
    family = found.get("addressType")
    ports = {
        port.get("name"): port["port"]
        for port in map(_mapping, _sequence(found.get("ports")))
        if isinstance(port.get("name"), str) and _is_port(port.get("port"))
    }
    if role is None or family not in _FAMILIES or WORK_PORT not in ports:
        return
    for listed in map(_mapping, _sequence(found.get("endpoints"))):
        # All addresses of an endpoint are the same one, and the first is the one to use.
        host = _host(next(iter(_sequence(listed.get("addresses"))), None), family)
        if host is None:
            continue
        address = f"{host}:{ports[WORK_PORT]}"
        name = _mapping(listed.get("targetRef")).get("name")
        is_name = isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS
        yield (
            _FAMILIES.index(family),
            Listing(
                name=str(name) if is_name else address,
                role=role,
                endpoint=Endpoint(address, f"{host}:{ports.get(ADMIN_PORT, ports[WORK_PORT])}"),
                stopping=_mapping(listed.get("conditions")).get("terminating") is True,
            ),
        )


def _host(address: object, family: str) -> str | None:
    """As it stands before a port; `None`: it is no address of this family."""
    try:
        read = ipaddress.ip_address(address) if isinstance(address, str) else None
    except ValueError:
        return None
    if read is None or f"IPv{read.version}" != family:
        return None
    return f"[{read}]" if read.version == 6 else str(read)


def _is_port(port: object) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 0 < port <= 0xFFFF


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


class SliceCache:
    """The slices as a list and the events of a watch after it leave them."""

    def __init__(self) -> None:
        self.version = ""
        """Where a watch goes on from; empty: there must be a list first."""
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, listed: Mapping[str, Any]) -> None:
        """Take a whole list."""
        items = [item for item in _sequence(listed.get("items")) if isinstance(item, Mapping)]
        self._slices = {_name(item): item for item in items}
        self.version = str(_mapping(listed.get("metadata")).get("resourceVersion") or "")

    def apply(self, event: Mapping[str, Any]) -> bool:
        """Take one event of a watch; whether the slices may have changed.

        Raises:
            WatchEnded: the watch is over; where `version` is empty then, a list is needed.
        """
        kind, about = event.get("type"), _mapping(event.get("object"))
        if kind == "ERROR":
            code = about.get("code")
            if code == 410:  # what we have seen last is forgotten there
                self.version = ""
            raise WatchEnded(f"the API server ended the watch: {code} {about.get('message', '')}"[:300])
        version = _mapping(about.get("metadata")).get("resourceVersion")
        if kind in ("ADDED", "MODIFIED"):
            self._slices[_name(about)] = about
        elif kind == "DELETED":
            self._slices.pop(_name(about), None)
        elif kind != "BOOKMARK":
            return False
        if version:
            self.version = str(version)
        return bool(kind != "BOOKMARK")

    def listings(self) -> tuple[Listing, ...]:
        """See `listings_of`."""
        return listings_of(self._slices.values())


class WatchEnded(Exception):
    """A watch is over."""


def _name(found: Mapping[str, Any]) -> str:
    return str(_mapping(found.get("metadata")).get("name"))
