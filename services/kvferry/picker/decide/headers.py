"""Names of the endpoint picker protocol 1.0.0 of the Gateway API Inference Extension (its proposal 004), and the
formats of the values."""

import ipaddress
from collections.abc import Iterable

DESTINATION = "x-gateway-destination-endpoint"
"""Header and key of dynamic metadata: the chosen endpoint, then fallbacks, `ip:port` separated by commas."""
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key of metadata, and header: the endpoints of which one must be chosen."""
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SERVED = "x-gateway-destination-endpoint-served"
"""Key of metadata in `DESTINATION_NAMESPACE`, with the response: the endpoint that served the request."""
OBJECTIVE = "x-gateway-inference-objective"
FAIRNESS = "x-gateway-inference-fairness-id"
REQUEST_ID = "x-request-id"
PREFILL_HEADER = "x-prefiller-host-port"
"""Header in which sidecars of decode pods expect the prefill endpoint (llm-d)."""
REMOVED = (OBJECTIVE, FAIRNESS, SUBSET)
"""Headers between gateway and picker, which a model server must not see."""
MAX_SUBSET = 4096
"""Maximum number of endpoints in a subset; further ones are ignored."""


def endpoint_list(text: str) -> tuple[str, ...]:
    """Return the endpoints in a comma-separated list, without empty and repeated ones, at most `MAX_SUBSET`."""
    parts = (part.strip() for part in text.split(",", MAX_SUBSET))
    return tuple(dict.fromkeys(part for part in parts if part))[:MAX_SUBSET]


def matches(address: str, subset: Iterable[str]) -> bool:
    """Return whether an endpoint is in a subset, whose entries may lack the port: then they stand for all ports.

    Args:
        address: `ip:port` of the endpoint.
        subset: entries of the subset, a set for speed.
    """
    return address in subset or address.rpartition(":")[0] in subset


def address_of(host: str, port: int) -> str:
    """Return `ip:port`, with brackets around an IPv6 address.

    Raises:
        ValueError: `host` is not an IP address.
    """
    found = ipaddress.ip_address(host.strip("[]"))
    return f"[{found}]:{port}" if found.version == 6 else f"{found}:{port}"
