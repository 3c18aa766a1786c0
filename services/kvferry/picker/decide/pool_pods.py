"""The endpoints of an `InferencePool` of the Gateway API: the ports of its ready pods. No I/O.

Each of the pool's target ports on each pod is an endpoint of its own, since each may be a rank of a data-parallel
server. A label of the pod says whether it only computes prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.decide.routing.discovery import MAX_LISTINGS, ROLE_LABEL, Listing, SliceCache
from kvferry.gateway.decide.routing.routes import Place
from kvferry.picker.decide.endpoints import PoolEndpoint
from kvferry.picker.decide.headers import address_of

ROLE_LABELS = ("llm-d.ai/role", ROLE_LABEL)
"""Labels of pods with their role, in the order in which they count."""
PREFILL, ANSWERS = "prefill", "both"
_MAX_PORTS = 8
_MAX_LABELS = 64


@dataclass(frozen=True, slots=True)
class PodSelection:
    """The part of an `InferencePool` that says which endpoints it has."""

    selector: str
    """Label selector of the pods, `key=value` with commas."""
    ports: tuple[int, ...]

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "PodSelection":
        """Read the JSON of an object of inference.networking.k8s.io/v1.

        Raises:
            UsageError: it has no selector or no target port.
        """
        spec = _mapping(found.get("spec"))
        labels = _mapping(_mapping(spec.get("selector")).get("matchLabels"))
        pairs = [f"{key}={value}" for key, value in sorted(labels.items()) if isinstance(value, str)]
        listed = [_mapping(port).get("number") for port in _sequence(spec.get("targetPorts"))[:_MAX_PORTS]]
        ports = tuple(port for port in map(_port, listed) if port)
        if not pairs or len(pairs) > _MAX_LABELS or not ports:
            raise UsageError("the InferencePool has no selector.matchLabels or no targetPorts", field="inference_pool")
        return cls(",".join(pairs), ports)


class PodCache(SliceCache):
    """The pods of a pool: a list response with later watch events applied."""

    def __init__(self) -> None:
        super().__init__()
        self.ports: tuple[int, ...] = ()
        """Target ports of the pool."""

    def listings(self) -> tuple[Listing, ...]:
        """Return the endpoints of the ready pods; malformed pods are left out."""
        found = [listing for pod in self._slices.values() for listing in _listings(pod, self.ports)]
        return tuple(sorted(found, key=lambda one: (one.name, one.endpoint.address))[:MAX_LISTINGS])


def _listings(pod: Mapping[str, Any], ports: Sequence[int]) -> list[Listing]:
    metadata, status = _mapping(pod.get("metadata")), _mapping(pod.get("status"))
    name, host = metadata.get("name"), status.get("podIP")
    conditions = map(_mapping, _sequence(status.get("conditions")))
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    stopping = metadata.get("deletionTimestamp") is not None
    if not isinstance(name, str) or not isinstance(host, str) or not (ready or stopping):
        return []
    labels = _mapping(metadata.get("labels"))
    role = next((labels[label] for label in ROLE_LABELS if isinstance(labels.get(label), str)), "")
    node = _mapping(pod.get("spec")).get("nodeName")
    found = []
    for port in ports:
        try:
            address = address_of(host, port)
        except ValueError:
            return []
        found.append(
            Listing(
                name=name if len(ports) == 1 else f"{name}:{port}",
                role=PREFILL if role == PREFILL else ANSWERS,
                endpoint=Endpoint(address, address),
                stopping=stopping,
                place=Place(node if isinstance(node, str) else ""),
            )
        )
    return found


def pool_endpoint(listing: Listing, metrics_port: int) -> PoolEndpoint:
    """Return the endpoint of a listing.

    Args:
        listing: one of `PodCache.listings`.
        metrics_port: port of its metrics; 0 for that of requests.
    """
    address = listing.endpoint.address
    scraped = f"{address.rpartition(':')[0]}:{metrics_port}" if metrics_port else address
    return PoolEndpoint(
        address,
        listing.name,
        scraped,
        is_prefill=listing.role == PREFILL,
        is_stopping=listing.stopping,
        place=listing.place,
    )


def _port(port: object) -> int:
    """Return a port; 0 if it is none."""
    return port if isinstance(port, int) and not isinstance(port, bool) and 0 < port <= 0xFFFF else 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
