"""What worker and gateway pods have in common: identity, confinement, volumes, the user's template on top."""

import re
from typing import Any

from kvferry.operator import names
from kvferry.operator.overlay import overlay
from kvferry.operator.spec import Cache, Json, Pool

CACHE_HOME = "/var/cache/home"
KEYS_FOLDER = "/etc/kvferry/keys"
_SUFFIXES = re.compile(r"([KMGT])i$")


def owner(pool: Pool) -> Json:
    """Metadata that makes an object the pool's: gone with it, and no finalizer is needed."""
    return {
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": "InferencePool",
                "name": pool.name,
                "uid": pool.uid,
                "controller": True,
            }
        ]
    }


def child(pool: Pool, api_version: str, kind: str, name: str, role: str | None = None, **parts: Any) -> Json:
    """An object of the pool's, with its labels and owner; `parts` are its top-level fields."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pool.namespace,
            "labels": names.pool_labels(pool.name, role),
            **owner(pool),
        },
        **parts,
    }


def confined(container: Json) -> Json:
    """`container` with no rights that it does not need."""
    return container | {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    }


def pod_template(pool: Pool, labels: dict[str, str], pod_spec: Json, template: Json) -> Json:
    """The template of a pod, with the user's laid over it."""
    base = {
        "metadata": {"labels": labels},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": names.NON_ROOT_UID,
                "runAsGroup": names.NON_ROOT_UID,
                "fsGroup": names.NON_ROOT_UID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "enableServiceLinks": False,
            **pod_spec,
        },
    }
    if pool.spec.image_pull_secrets:
        base["spec"]["imagePullSecrets"] = [{"name": name} for name in pool.spec.image_pull_secrets]
    merged = overlay(base, {name: template[name] for name in ("metadata", "spec") if name in template})
    # The selectors of Deployments and Services rest on these.
    merged["metadata"]["labels"] = {**merged["metadata"].get("labels", {}), **labels}
    return merged


def scratch() -> tuple[list[Json], list[Json]]:
    """Volumes and mounts for what a process writes; its root is read-only."""
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}, {"name": "home", "emptyDir": {}}]
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": CACHE_HOME}]  # noqa: S108
    return volumes, mounts


def model_volume(cache: Cache | None) -> tuple[list[Json], list[Json]]:
    """Volume and mount of the model cache; nothing when there is none."""
    if cache is None:
        return [], []
    volume: Json = {"name": "models"}
    if cache.persistent_volume_claim:
        volume["persistentVolumeClaim"] = {"claimName": cache.persistent_volume_claim}
    elif cache.host_path:
        volume["hostPath"] = {"path": cache.host_path, "type": "Directory"}
    else:
        volume["emptyDir"] = {}
    return [volume], [{"name": "models", "mountPath": cache.mount_path, "readOnly": cache.read_only}]


def environment(pool: Pool) -> list[Json]:
    """Variables of every container: who it is, and where it may write.

    A cache volume without `model.source` is where catalog models are kept.
    """
    cache = pool.spec.model.cache
    home = cache.mount_path if cache is not None and not pool.spec.model.source else CACHE_HOME
    return [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": CACHE_HOME},
        {"name": "XDG_CACHE_HOME", "value": home},
    ]


def size(quantity: str) -> str:
    """A size of the pool's (`8Gi`) as kvferry's flags read it (`8GiB`)."""
    return _SUFFIXES.sub(r"\1iB", quantity)


def model_of(pool: Pool) -> str:
    """What `--model` is told."""
    return pool.spec.model.source or pool.spec.model.name
