"""Worker pods: the Deployment of each role at a revision.

A Deployment's template never changes: a different template is a different revision with its own Deployments, so that
the operator controls the rollout of all roles and an upgrade of the operator does not restart any pods.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from blake3 import blake3

from kvferry.core.errors import InvariantBroken
from kvferry.core.settings.parsers import size_or_auto
from kvferry.operator.objects.adapter_list import ADAPTERS_FILE
from kvferry.operator.objects.pods import (
    KEYS_FOLDER,
    arguments,
    confined,
    environment,
    keys_secret_of,
    literal,
    model_volume,
    pod_template,
    scratch,
    shared_flags,
    size,
)
from kvferry.operator.objects.pods import child as pool_child
from kvferry.operator.objects.pool_tls import WORKER, tls_flags, tls_volume
from kvferry.operator.pool import names
from kvferry.operator.pool.quantities import canonical
from kvferry.operator.pool.spec import InferencePool, Json, RoleEngineSpec, RoleSpec, StorageTierSpec

_DISK_TIER = "/var/cache/tier"
_DRAIN_MARGIN_SECONDS = 15
"""Time in seconds after the drain for closing files and notifying peers."""
_LEASE_SECONDS = 30
"""Maximum duration in seconds of a read by a decode worker (the worker's `--lease-seconds`)."""
_BESIDE_KV_BYTES = 1 << 30
"""Memory in bytes besides KV: interpreter, libraries and a small model. For a large model, users must set
`roles[].resources`."""
_AUTO_KV_BYTES = 1 << 30
"""KV memory of a CPU worker with `kvMemory: auto`. GPU pods have `roles[].resources`."""
_ADAPTERS_FOLDER = "/etc/kvferry/adapters"
_START_SECONDS = 1800


def revision_of(pool: InferencePool, default_image: str) -> str:
    """Compute the revision of the worker pods: a digest of their inputs, eight hexadecimal digits. It depends on the
    values of the inputs, not on their notation."""
    inputs = canonical(msgspec.to_builtins(_inputs(pool, default_image)))
    return blake3(msgspec.json.encode(inputs, order="sorted")).hexdigest(4)


def _inputs(pool: InferencePool, default_image: str) -> dict[str, Any]:
    spec = pool.spec
    return {
        **({"keys": pool.keys} if pool.keys else {}),
        **({"tls": spec.tls} if spec.tls.mode != "Off" else {}),
        "flags": shared_flags(pool),
        "model": spec.model,
        "engine": spec.engine,
        "connector": spec.connector,
        "tiers": [msgspec.structs.replace(tier, size=_bytes(tier.size)) for tier in spec.tiers],
        "drain": spec.drain.seconds,
        "keys_secret": spec.internal_keys,
        "image": [spec.image or default_image, spec.image_pull_policy, spec.image_pull_secrets],
        "roles": sorted(
            (_role_inputs(role) for role in spec.roles),
            key=lambda part: str(part[0]),
        ),
    }


def _role_inputs(role: RoleSpec) -> list[Any]:
    return [role.name, _engine(role), {"resources": role.resources}, role.template]


def _engine(role: RoleSpec) -> RoleEngineSpec:
    """Return a role's engine settings with sizes in bytes, so that 0.5Gi and 512MiB give the same revision."""
    sizes = {"kv_memory": _bytes(role.engine.kv_memory), "adapter_memory": _bytes(role.engine.adapter_memory)}
    return msgspec.structs.replace(role.engine, **sizes)


def _bytes(quantity: str) -> str:
    return str(size_or_auto(size(quantity))) if quantity else ""


def deployments(pool: InferencePool, revision: str, default_image: str) -> dict[str, Json]:
    """Build the Deployment of each role at `revision`, without `spec.replicas`."""
    return {role.name: _deployment(pool, role, revision, default_image) for role in pool.spec.roles}


def with_replicas(deployment: Mapping[str, Any], replicas: int) -> Json:
    """Return a copy of `deployment` with `spec.replicas`."""
    return {**deployment, "spec": {**deployment["spec"], "replicas": replicas}}


def _deployment(pool: InferencePool, role: RoleSpec, revision: str, default_image: str) -> Json:
    marks = {names.LABEL_POOL: pool.name, names.LABEL_ROLE: role.name, names.LABEL_REVISION: revision}
    labels = names.pool_labels(pool.name, role.name) | marks
    # The endpoint picker of the Gateway API Inference Extension reads these labels.
    labels |= {"llm-d.ai/role": role.name, "llm-d.ai/engine-type": "vllm"}
    made = pool_child(pool, "apps/v1", "Deployment", names.deployment_name(pool.name, role.name, revision), role.name)
    made["metadata"]["labels"] |= {names.LABEL_REVISION: revision}
    made["spec"] = {
        "selector": {"matchLabels": marks},
        "revisionHistoryLimit": 1,
        "progressDeadlineSeconds": pool.spec.rollout.progress_deadline_seconds,
        "template": pod_template(pool, labels, _pod(pool, role, default_image), role.template),
    }
    return made


def _pod(pool: InferencePool, role: RoleSpec, default_image: str) -> Json:
    volumes, mounts = scratch()
    model_volumes, model_mounts = model_volume(pool.spec.model.cache)
    tls_volumes, tls_mounts = tls_volume(pool, WORKER)
    volumes += [
        *model_volumes,
        *tls_volumes,
        {"name": "keys", "secret": {"secretName": keys_secret_of(pool)}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        # Set even in pools without adapters, so that adding the first adapter restarts no pods.
        {"name": "adapters", "configMap": {"name": names.adapters_object(pool.name), "optional": True}},
    ]
    mounts += [
        *model_mounts,
        *tls_mounts,
        {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  the default of 64 MiB is too small for UCX
        {"name": "adapters", "mountPath": _ADAPTERS_FOLDER, "readOnly": True},
    ]
    if any(tier.type == "disk" for tier in pool.spec.tiers):
        disk: Json = {"name": "tier", "emptyDir": {}}
        volumes.append(disk)
        mounts.append({"name": "tier", "mountPath": _DISK_TIER})
    drain = pool.spec.drain.seconds
    return {
        "serviceAccountName": f"{pool.name}-worker",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": max(drain, _LEASE_SECONDS) + _DRAIN_MARGIN_SECONDS,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {names.LABEL_POOL: pool.name, names.LABEL_ROLE: role.name}},
            }
        ],
        "containers": [
            confined(
                {
                    "name": names.WORKER_CONTAINER,
                    "image": pool.spec.image or default_image,
                    "imagePullPolicy": pool.spec.image_pull_policy,
                    "args": _arguments(pool, role),
                    "env": [*environment(pool), *_tier_environment(pool.spec.tiers)],
                    "ports": [
                        {"name": "grpc", "containerPort": names.PORT_GRPC},
                        {"name": "admin", "containerPort": names.PORT_ADMIN},
                        {"name": "metrics", "containerPort": names.PORT_METRICS},
                    ],
                    "resources": role.resources or _default_resources(role),
                    "volumeMounts": mounts,
                    # If a container fails, the last lines of its log become the reason in the pool's status.
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    **_probes(pool),
                }
            )
        ],
        "volumes": volumes,
    }


def _arguments(pool: InferencePool, role: RoleSpec) -> list[str]:
    spec, engine = pool.spec, role.engine
    flags = {
        "role": role.name,
        "connector": spec.connector.type,
        "listen": f"0.0.0.0:{names.PORT_GRPC}",
        "admin": f"0.0.0.0:{names.PORT_ADMIN}",
        "metrics": f"0.0.0.0:{names.PORT_METRICS}",
        "advertise-host": "$(POD_IP)",
        "worker-id": "$(POD_NAME)",
        "dtype": engine.dtype or spec.model.dtype,
        "weights": spec.model.weights,
        "numerics": spec.engine.numerics,
        "max-model-len": spec.model.max_model_len,
        "window-pages": spec.model.window_pages,
        "block-tokens": spec.model.block_tokens,
        "device": engine.device,
        "kv-memory": size(engine.kv_memory),
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "threads": engine.threads,
        "tensor-parallel": role.parallelism.tensor,
        "token-budget": engine.token_budget,
        "max-chunk-tokens": engine.max_chunk_tokens,
        "max-mixed-tokens": engine.max_mixed_tokens,
        "background-steps": engine.background_steps,
        "max-num-seqs": engine.max_num_seqs,
        "stream-interval": spec.engine.stream_interval,
        "speculation": engine.speculation,
        "adapter-slots": engine.adapter_slots,
        "max-adapter-rank": engine.max_adapter_rank,
        "adapter-memory": size(engine.adapter_memory),
        "pin-share": engine.pin_share,
        "retention-share": engine.retention_share,
        "adapters-file": f"{_ADAPTERS_FOLDER}/{ADAPTERS_FILE}",
        "tier-object-tokens": spec.engine.tier_object_tokens,
        "load-policy": spec.engine.load_policy,
        "verify-kv": spec.engine.verify_kv,
        "kv-encryption": str(spec.connector.encryption).lower(),
        "ticket-key-file": f"{KEYS_FOLDER}/ticket-key",
        "tenant-key-file": f"{KEYS_FOLDER}/tenant-key",
        "offer-seconds": spec.connector.offer_seconds,
        "lease-seconds": _LEASE_SECONDS,
        "drain-seconds": spec.drain.seconds,
        **shared_flags(pool),
    }
    if spec.tls.mode != "Off":
        flags |= {**tls_flags(pool), "health": f"0.0.0.0:{names.PORT_HEALTH}"}
    return arguments("worker", flags, references=("advertise-host", "worker-id"))


def _tier_environment(tiers: tuple[StorageTierSpec, ...]) -> list[Json]:
    """Return the environment variable with the tier URLs, since process arguments would expose passwords in URLs."""
    if not tiers:
        return []
    variables: list[Json] = []
    urls = []
    for i, tier in enumerate(tiers):
        if tier.url_secret is not None:
            name = f"TIER_{i}_URL"
            secret = {"name": tier.url_secret.name, "key": tier.url_secret.key}
            variables.append({"name": name, "valueFrom": {"secretKeyRef": secret}})
            urls.append(f"$({name})")
        elif tier.type == "redis":
            urls.append(literal(tier.url))
        elif tier.type == "disk":
            urls.append(f"disk://{_DISK_TIER}/{i}?size={size(tier.size)}")
        elif tier.type == "dram":
            urls.append(f"dram://?size={size(tier.size)}")
        else:
            raise InvariantBroken(f"tier {tier.type!r} has no URL here")
    return [*variables, {"name": "KVFERRY_TIER", "value": ",".join(urls)}]


def _default_resources(role: RoleSpec) -> Json:
    kv_bytes = int(str(size_or_auto(size(role.engine.kv_memory)))) or _AUTO_KV_BYTES
    memory = kv_bytes + _BESIDE_KV_BYTES
    return {"requests": {"cpu": "100m", "memory": str(memory)}}


def _probes(pool: InferencePool) -> Json:
    """Build the probes: readiness on the work port, after the first generated token; liveness on the admin port, which
    responds even if the engine is busy. With TLS, both use the health port."""
    is_plain = pool.spec.tls.mode == "Off"
    ready = {"grpc": {"port": names.PORT_GRPC if is_plain else names.PORT_HEALTH}, "timeoutSeconds": 5}
    alive: Json = {"port": names.PORT_ADMIN} if is_plain else {"port": names.PORT_HEALTH, "service": "liveness"}
    return {
        "startupProbe": {**ready, "periodSeconds": 1, "failureThreshold": _START_SECONDS},
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {
            "grpc": alive,
            "timeoutSeconds": 10,
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
    }
