"""Common parts of worker and gateway pods: owner, security context, volumes, and the user's template."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from kvferry.operator.objects.overlay import overlay
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import CacheSpec, InferencePool, Json

CACHE_HOME = "/var/cache/home"
KEYS_FOLDER = "/etc/kvferry/keys"
_SUFFIXES = re.compile(r"([KMGT])i$")


def owner(pool: InferencePool) -> Json:
    """Return an owner reference to the pool, so that objects are garbage-collected with the pool, without a
    finalizer."""
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


def child(pool: InferencePool, api_version: str, kind: str, name: str, role: str | None = None, **parts: Any) -> Json:
    """Build an object with the labels and the owner reference of a pool.

    Args:
        pool: owner of the object.
        api_version: group and version, for example `apps/v1`.
        kind: kind of the object.
        name: name of the object.
        role: role that the object belongs to; `None` if it belongs to the whole pool.
        parts: additional top-level fields, for example `spec`.
    """
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
    """Return `container` with a restricted security context."""
    return container | {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    }


def pod_template(pool: InferencePool, labels: dict[str, str], pod_spec: Json, template: Json) -> Json:
    """Build a pod template and merge the user's template over it.

    Args:
        pool: the pool, with its pull secrets and the identifier of its keys.
        labels: labels of the pods, which the user's template cannot change.
        pod_spec: pod spec; takes precedence over the security context and other defaults.
        template: the user's template; of its fields, only `metadata` and `spec` are used.
    """
    base: Json = {
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
    if pool.keys:
        base["metadata"]["annotations"] = {names.ANNOTATION_KEYS: pool.keys}
    merged = overlay(base, {name: template[name] for name in ("metadata", "spec") if name in template})
    # The user's template cannot change these labels, since Deployments and Services select pods by them.
    merged["metadata"]["labels"] = {**merged["metadata"].get("labels", {}), **labels}
    return merged


def scratch() -> tuple[list[Json], list[Json]]:
    """Return writable volumes and their mounts, since the root file system is read-only."""
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}, {"name": "home", "emptyDir": {}}]
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": CACHE_HOME}]  # noqa: S108
    return volumes, mounts


def model_volume(cache: CacheSpec | None) -> tuple[list[Json], list[Json]]:
    """Return the volume and mount of the model cache, or empty lists if the pool has no cache."""
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


def environment(pool: InferencePool) -> list[Json]:
    """Return the environment variables of every container: pod name, pod IP, and writable directories.

    Without `model.source`, models of the catalog are stored in the cache volume.
    """
    cache = pool.spec.model.cache
    home = cache.mount_path if cache is not None and not pool.spec.model.source else CACHE_HOME
    return [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": CACHE_HOME},
        {"name": "XDG_CACHE_HOME", "value": literal(home)},
    ]


def keys_secret_of(pool: InferencePool) -> str:
    """Return the name of the Secret with the pool's keys: the one in the spec, or the one that the operator creates."""
    return pool.spec.internal_keys.secret_name or names.keys_secret(pool.name)


def size(quantity: str) -> str:
    """Convert a Kubernetes quantity (`8Gi`) to the notation of kvferry's flags (`8GiB`)."""
    return _SUFFIXES.sub(r"\1iB", quantity)


def literal(text: str) -> str:
    """Return a text for arguments and variables of a container that reaches the process unchanged: the kubelet replaces
    `$(NAME)` by the value of a variable, which may be a secret, and `$$` by `$`."""
    return text.replace("$", "$$")


def arguments(command: str, flags: Mapping[str, object], references: Collection[str] = ()) -> list[str]:
    """Return the arguments of a container.

    Args:
        command: command of `kvferry`.
        flags: values by flag.
        references: flags whose values name variables, which the kubelet replaces; it leaves the others unchanged.
    """
    values = {name: value if name in references else literal(str(value)) for name, value in flags.items()}
    return [command, *(f"--{name}={value}" for name, value in values.items())]


def shared_flags(pool: InferencePool) -> dict[str, object]:
    """Return the flags that gateway and workers have in common: the model, the order of requests, logs and traces."""
    spec, seen = pool.spec, pool.spec.observability
    flags: dict[str, object] = {
        "model": spec.model.source or spec.model.name,
        "served-name": spec.model.name,
        "tool-call-parser": spec.model.tool_call_parser,
        "reasoning-parser": spec.model.reasoning_parser,
        "scheduling": spec.engine.request_policy,
        "log-level": seen.log_level,
        "log-json": str(seen.log_json).lower(),
    }
    if spec.engine.class_weights:
        flags["class-weights"] = ",".join(f"{of.priority}={of.weight}" for of in spec.engine.class_weights)
    if seen.otlp:
        flags |= {"otlp": seen.otlp, "trace-sample": seen.trace_sample}
    return flags
