"""The part of `GET /fleet` about flow control. Fields may be added but not removed or changed."""

from typing import Any

from kvferry.gateway.decide.flow.capacity import UNBOUNDED, Room
from kvferry.gateway.decide.flow.controller import FlowController, QueueSize
from kvferry.gateway.decide.flow.quotas import Account, Quotas

MAX_TENANTS = 1024
"""Maximum number of tenants in a report: the ones with the most queued requests."""


def flow_report(controller: FlowController, quotas: Quotas, room: Room) -> dict[str, Any]:
    """Build the JSON object: the size of the queue by priority and by tenant, and the capacity in use.

    Args:
        controller: the queue and the dispatched requests.
        quotas: accounts of the tenants.
        room: capacity of the fleet.
    """
    queued = controller.by_tenant
    named = {tenant for tenant, account in quotas.accounts.items() if account.num_open} | set(queued)
    ranked = sorted(named, key=lambda tenant: (-queued[tenant].requests if tenant in queued else 0, tenant))
    return {
        "queued": controller.num_queued,
        "queued_bytes": controller.queued_bytes,
        "queued_prompt_tokens": controller.queued_prefill_tokens,
        "dispatched": controller.num_dispatched,
        "sequences": {"in_use": controller.used(room), "bound": _bound(room.sequences)},
        "beams": {"in_use": controller.num_beams, "bound": _bound(room.searches)},
        "prefill_tokens": {"in_use": controller.prefill_tokens, "bound": _bound(room.prefill_tokens)},
        "bands": [{"priority": band, **_size(size)} for band, size in sorted(controller.by_band.items())],
        "tenants": [_tenant(name, queued.get(name), quotas.accounts.get(name)) for name in ranked[:MAX_TENANTS]],
    }


def _tenant(name: str, size: QueueSize | None, account: Account | None) -> dict[str, Any]:
    running = 0 if account is None else account.num_open
    size = size or QueueSize()
    return {"tenant": name, **_size(size), "dispatched": max(0, running - size.requests)}


def _size(size: QueueSize) -> dict[str, int]:
    return {"queued": size.requests, "queued_bytes": size.num_bytes}


def _bound(value: int) -> int | None:
    """Return a bound; `None` if there is none."""
    return None if value >= UNBOUNDED else value
