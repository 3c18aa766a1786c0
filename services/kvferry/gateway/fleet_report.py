"""The fleet as `GET /fleet` tells it: what an operator needs for its status, its scaling and its choice of victims.

The fields are a promise, written down in docs/operations.md; they only grow.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.gateway.member import WorkerView
from kvferry.gateway.membership import SourceState


def fleet_report(
    views: Iterable[WorkerView],
    *,
    gateway: str,
    pool: str,
    held: int,
    source: SourceState,
    wake_trouble: str,
    handoffs: Mapping[str, int],
) -> dict[str, Any]:
    """One JSON object."""
    return {
        "gateway": gateway,
        "pool": pool,
        "held": held,
        "source": {"state": source.state.value, "detail": source.detail},
        "waking": {"detail": wake_trouble},
        "handoffs": dict(handoffs),
        "workers": [_worker(view) for view in views],
    }


def _worker(view: WorkerView) -> dict[str, Any]:
    return {
        "name": view.name,
        "address": view.endpoint.address,
        "role": view.role,
        "takes_work": view.takes_work,
        "why_not": view.why_not,
        "worker_id": view.worker_id,
        "incarnation": view.incarnation,
        "fingerprint": view.fingerprint.hex(),
        "family": view.family.hex(),
        "connector": view.connector,
        "domain": view.domain,
        "model_digest": view.model_digest,
        "running": view.running,
        "waiting": view.waiting,
        "in_flight": view.in_flight,
        "blocks_total": view.blocks_total,
        "blocks_free": view.blocks_free,
        "tickets_offered": view.tickets_offered,
        "tickets_claimed": view.tickets_claimed,
        "queue_seconds": None,
    }
