"""Pools for tests, and all objects of a pool."""

from typing import Any

from kvferry.operator.objects.gateway_pods import gateway_deployment
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR, scaler, surroundings
from kvferry.operator.objects.worker_pods import deployments, revision_of
from kvferry.operator.pool.spec import InferencePool, parse_pool

IMAGE = "kvferry:test"


def body(**spec: Any) -> dict[str, Any]:
    """Return a minimal InferencePool with the given fields of `spec`."""
    return {
        "apiVersion": "kvferry.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "chat", "namespace": "team", "uid": "u-1", "generation": 1},
        "spec": {"model": {"name": "m"}, "roles": [{"name": "prefill"}, {"name": "decode"}], **spec},
    }


def pool(**spec: Any) -> InferencePool:
    return parse_pool(body(**spec))


def made_of(pool: InferencePool) -> dict[str, dict[str, Any]]:
    """Return all objects of a pool by `Kind/name`, including those of all optional kinds; the revision is REV."""
    revision = revision_of(pool, IMAGE)
    found = [
        *surroundings(pool, frozenset({POD_MONITOR, EXTENSION_POOL})),
        *deployments(pool, "REV", IMAGE).values(),
        gateway_deployment(pool, IMAGE),
        *(scaler(pool, role, role.replicas) for role in pool.spec.roles),
    ]
    named = {f"{made['kind']}/{made['metadata']['name']}": made for made in found}
    return named | {"revision": {"name": revision}}
