"""The workers of a pool, from the EndpointSlices of its Services. No I/O.

The operator creates a headless Service per role, labeled with pool and role, which publishes addresses of pods that
are not ready yet. EndpointSlices list the workers that exist, including those that are terminating; readiness is part
of a worker's status.
"""

import ipaddress
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.decide.routing.routes import Place

POOL_LABEL = "kvferry.dev/pool"
ROLE_LABEL = "kvferry.dev/role"
WORK_PORT = "grpc"
ADMIN_PORT = "admin"
MAX_LISTINGS = 2048
"""Maximum number of workers; additional workers are ignored, so that a faulty source cannot exhaust the gateway's
memory."""

_ROLES = frozenset({"prefill", "decode", "both"})
_FAMILIES = ("IPv4", "IPv6")
"""Address families in order of preference, for pods with addresses of both families."""
_MAX_NAME_CHARS = 253


@dataclass(frozen=True, slots=True)
class Listing:
    """A worker as listed by its source: name, role, addresses."""

    name: str
    """Pod name; the worker's address if it has no pod. A different name at the same address is a different worker."""
    role: str
    endpoint: Endpoint
    stopping: bool = False
    """Whether the pod is terminating: the worker gets no new requests, running requests continue."""
    place: Place = Place()  # noqa: RUF009  frozen
    """Node and zone of the pod, if known."""

    @property
    def key(self) -> tuple[str, str, Endpoint]:
        """The identity of the worker: listings with equal keys are the same worker."""
        return self.name, self.role, self.endpoint


@dataclass(frozen=True, slots=True)
class Update:
    """An update from service discovery."""

    listings: tuple[Listing, ...] | None = None
    """All workers; `None` if they are unknown, in which case the last known workers stay."""
    failure: str = ""
    """Reason why the list is unknown or may be stale; empty if it is current."""


class DiscoverySource(Protocol):
    """Service discovery: yields the listings of all workers of a fleet whenever they change."""

    def updates(self) -> AsyncIterator[Update]:
        """Return an endless stream of updates; closing the iterator releases the source's thread and connections."""
        ...


def listings_of(slices: Iterable[Mapping[str, Any]]) -> tuple[Listing, ...]:
    """Return the workers listed in EndpointSlice objects, without duplicates, in a fixed order; skip malformed entries.

    A pod may be in several slices: while slices are rearranged, and with a slice per IP family. It is stopping if any
    slice marks it as terminating, since termination is final. If two pods have the same address, a terminated pod and
    its successor, the pod that is not stopping is returned.
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
    role = str(_mapping(_mapping(found.get("metadata")).get("labels")).get(ROLE_LABEL))
    family = found.get("addressType")
    ports = {
        port.get("name"): port["port"]
        for port in map(_mapping, _sequence(found.get("ports")))
        if isinstance(port.get("name"), str) and _is_port(port.get("port"))
    }
    if role not in _ROLES or family not in _FAMILIES or WORK_PORT not in ports:
        return
    for listed in map(_mapping, _sequence(found.get("endpoints"))):
        # All addresses of an endpoint are equivalent; Kubernetes recommends the first.
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
                place=Place(_label(listed.get("nodeName")), _label(listed.get("zone"))),
            ),
        )


def _host(address: object, family: str) -> str | None:
    """Return `address` in the form used in `host:port`; `None` if it is not an address of this family."""
    try:
        read = ipaddress.ip_address(address) if isinstance(address, str) else None
    except ValueError:
        return None
    if read is None or f"IPv{read.version}" != family:
        return None
    return f"[{read}]" if read.version == 6 else str(read)


def _label(value: object) -> str:
    """Return a name from the API server; empty if it is not a valid name."""
    return value if isinstance(value, str) and len(value) <= _MAX_NAME_CHARS else ""


def _is_port(port: object) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 0 < port <= 0xFFFF


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


class SliceCache:
    """The current EndpointSlices: a list response with later watch events applied."""

    def __init__(self) -> None:
        self.version = ""
        """Resource version from which a watch resumes; empty if the slices must be listed again."""
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, listed: Mapping[str, Any]) -> None:
        """Replace all slices with those of a list response."""
        items = [item for item in _sequence(listed.get("items")) if isinstance(item, Mapping)]
        self._slices = {_name(item): item for item in items}
        self.version = str(_mapping(listed.get("metadata")).get("resourceVersion") or "")

    def apply(self, event: Mapping[str, Any]) -> bool:
        """Apply a watch event; return whether the slices may have changed.

        Raises:
            WatchEnded: the server ended the watch; `version` is empty if the slices must be listed again.
        """
        kind, about = event.get("type"), _mapping(event.get("object"))
        if kind == "ERROR":
            code = about.get("code")
            if code == 410:  # the resource version has expired
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
        """Return the workers in the current slices; see `listings_of`."""
        return listings_of(self._slices.values())


class WatchEnded(Exception):
    """The server ended a watch."""


def _name(found: Mapping[str, Any]) -> str:
    return str(_mapping(found.get("metadata")).get("name"))
