"""The body of `GET /fleet`, which the operator reads for status, scaling and the choice of pods to remove.

The fields are public (docs/operations.md); fields may be added but not removed or changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvferry.gateway.decide.cache_map.cache_map import CacheMap
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
    cache_map: CacheMap | None = None,
    flow: Mapping[str, object] | None = None,
    certificate_not_after: float = 0.0,
) -> dict[str, Any]:
    """Build the JSON object that `GET /fleet` returns.

    Args:
        views: the workers.
        gateway: name of this gateway process.
        pool: name of the pool; empty without one.
        held: number of samples that wait for a pool's first worker.
        source: state of service discovery.
        wake_failure: reason why the last scaling from zero failed; empty if it did not.
        handoffs: number of hand-offs by outcome.
        model_tokens: context length of the model in tokens.
        cache_map: adds the state of each worker's map.
        flow: adds the queue, from `gateway.admission.flow_report`.
        certificate_not_after: end of the validity of the gateway's certificate for the pool, wall-clock seconds; 0
            without pool TLS.
    """
    return {
        "gateway": gateway,
        "pool": pool,
        "held": held,
        "source": {"state": source.state.value, "detail": source.detail},
        "waking": {"detail": wake_failure},
        "handoffs": dict(handoffs),
        "model_tokens": model_tokens,
        "pool_certificate_not_after": int(certificate_not_after),
        **({} if flow is None else {"flow": flow}),
        "workers": [_worker(view) | _map(view.endpoint.address, cache_map) for view in views],
    }


def _map(address: str, cache_map: CacheMap | None) -> dict[str, Any]:
    if cache_map is None:
        return {}
    replica = cache_map.replicas.get(address)
    return {
        "cache_map": {
            "state": cache_map.state(address).value,
            "why": "not subscribed yet" if replica is None else replica.why,
            "blocks": 0 if replica is None else replica.num_indexed,
        }
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
        "device": view.device,
        "staged": view.is_staged,
        "adapters": [{"name": name, "digest": digest.hex()} for name, digest in sorted(view.adapters)],
        "adapter_failures": view.adapter_failures,
        "pause": {
            "mode": None if view.pause.mode is None else view.pause.mode.value,
            "by": view.pause.by,
            "since": view.pause.since,
            "settled": view.is_pause_settled,
        },
        "weights": asdict(view.weights),
        "in_flight": view.in_flight,
        "load": asdict(view.load),
    }
