"""The body of `GET /fleet`, which the operator reads for status, scaling and the choice of pods to remove.

The fields are public (docs/operations.md); fields may be added but not removed or changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvferry.gateway.fleet.member import WorkerView
from kvferry.gateway.fleet.membership import SourceState


def fleet_report(
    views: Iterable[WorkerView],
    *,
    gateway: str,
    pool: str,
    held: int,
    source: SourceState,
    wake_failure: str,
    handoffs: Mapping[str, int],
    model_tokens: int,
) -> dict[str, Any]:
    """Build the JSON object that `GET /fleet` returns."""
    return {
        "gateway": gateway,
        "pool": pool,
        "held": held,
        "source": {"state": source.state.value, "detail": source.detail},
        "waking": {"detail": wake_failure},
        "handoffs": dict(handoffs),
        "model_tokens": model_tokens,
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
        "context_tokens": view.max_model_tokens,
        "in_flight": view.in_flight,
        "load": asdict(view.load),
    }
