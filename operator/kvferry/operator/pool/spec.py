"""Spec of an InferencePool as frozen values, with the defaults of the schema.

The CustomResourceDefinition documents the fields; a test checks that both agree.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.core.errors import UsageError
from kvferry.core.process.struct_types import describe

Json = dict[str, Any]
Percentage = str
"""Number or percentage of pods, such as `3` or `25%`."""


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Cache(_Struct, frozen=True):
    """Settings of the volume with the model's files."""

    mount_path: str = "/models"
    read_only: bool = True
    persistent_volume_claim: str | UnsetType = UNSET
    host_path: str | UnsetType = UNSET


class Model(_Struct, frozen=True):
    """The model to serve."""

    name: str
    source: str = ""
    digest: str = ""
    dtype: str = "auto"
    max_tokens: int = 0
    window_pages: Literal["keep", "release"] = "keep"
    cache: Cache | None = None


class Scaling(_Struct, frozen=True):
    """Settings for scaling a role: mode, bounds and targets."""

    mode: Literal["Static", "External", "Auto"] = "Static"
    min_replicas: int = 1
    max_replicas: int = 10
    kv_target: int = 70
    requests_target: int = 16
    up_seconds: int = 0
    down_seconds: int = 300
    idle_seconds: int = 600


class Engine(_Struct, frozen=True):
    """Engine settings of a worker."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_memory: str = "auto"
    gpu_memory_percent: int = 90
    threads: int = 0
    token_budget: int = 2048
    max_sequences: int = 64
    adapter_slots: int = 8
    max_adapter_rank: int = 64
    pin_percent: int = 25


class Role(_Struct, frozen=True):
    """One role of worker pods."""

    name: Literal["prefill", "decode", "both"]
    replicas: int = 1
    scaling: Scaling = Scaling()
    engine: Engine = Engine()
    speculation: str = ""
    """Speculative decoding, as the worker's `--speculation`; empty for its default."""
    resources: Json = {}
    template: Json = {}

    def bounded(self, replicas: int) -> int:
        """Limit `replicas` to `minReplicas` .. `maxReplicas`; in mode Static, return it unchanged."""
        if self.scaling.mode == "Static":
            return replicas
        return min(max(replicas, self.scaling.min_replicas), self.scaling.max_replicas)


class Adapter(_Struct, frozen=True):
    """A LoRA adapter; requests select it as their model."""

    name: str
    source: str
    digest: str = ""


class ClassWeight(_Struct, frozen=True):
    """The weight of a priority with the scheduling policy `weighted`."""

    priority: int
    weight: int


class Connector(_Struct, frozen=True):
    """Settings of KV transfers between pods."""

    type: Literal["nixl", "tcp", "shm"] = "nixl"


class SecretKey(_Struct, frozen=True):
    """A key of a Secret."""

    name: str
    key: str = "url"


class Tier(_Struct, frozen=True):
    """One storage tier for KV."""

    type: Literal["dram", "disk", "redis"]
    size: str = ""
    url: str = ""
    url_secret: SecretKey | None = None


class Routing(_Struct, frozen=True):
    """Settings for routing requests from the gateway to worker pods."""

    policy: Literal["seconds", "prefix-hash", "round-robin", "least-loaded", "random"] = "seconds"
    prefix_blocks: int = 4
    block_tokens: int = 16
    skip_prefill_below_tokens: int = 0
    kv_prefetch_tokens: int = 1024


class FlowControl(_Struct, frozen=True):
    """Admission limits and queueing of the gateway."""

    max_streams: int = 1024
    max_held: int = 256
    hold_seconds: int = 60
    request_timeout_seconds: int = 600


class Rollout(_Struct, frozen=True):
    """Settings for the rollout of a new revision."""

    max_surge: Percentage = "25%"
    max_unavailable: Percentage = "0"
    max_skew: int = 25
    paused: bool = False
    rollback_to: str = ""
    progress_deadline_seconds: int = 600
    history_limit: int = 5


class Drain(_Struct, frozen=True):
    """Settings for draining terminating pods."""

    seconds: int = 30
    linger_seconds: int = 5


class Tenancy(_Struct, frozen=True):
    """Keys that isolate tenants."""

    keys_secret: str = ""


class Tenants(_Struct, frozen=True):
    """Keys, shares and quotas of the clients' tenants."""

    secret: str = ""


class Tls(_Struct, frozen=True):
    """TLS between the pool's pods."""

    mode: Literal["Off", "Managed", "Secret"] = "Off"
    secret_name: str = ""
    """Secret with tls.crt, tls.key and ca.crt, with mode Secret."""


class Service(_Struct, frozen=True):
    """The gateway's Service."""

    type: str = "ClusterIP"
    http_port: int = 80
    grpc_port: int = 9000
    annotations: dict[str, str] = {}


class Gateway(_Struct, frozen=True):
    """The gateway pods."""

    replicas: int = 1
    api_keys_secret: str = ""
    tls_secret: str = ""
    client_ca_secret: str = ""
    """Secret with ca.crt, the CA that must have signed clients' certificates; empty if clients need none."""
    service: Service = Service()
    resources: Json = {}
    template: Json = {}
    inference_extension: Literal["Off", "Auto"] = "Off"


class Observability(_Struct, frozen=True):
    """Settings for monitoring the pool."""

    pod_monitor: Literal["Off", "Auto"] = "Auto"
    pod_monitor_labels: dict[str, str] = {}
    otlp: str = ""
    trace_sample_percent: int = 1


class Disruption(_Struct, frozen=True):
    """Settings of the pool's PodDisruptionBudgets."""

    max_unavailable: Percentage = "1"


class PoolSpec(_Struct, frozen=True):
    """The desired state of a pool."""

    model: Model
    roles: tuple[Role, ...]
    adapters: tuple[Adapter, ...] = ()
    """Adapters of all roles; changes restart no pods."""
    connector: Connector = Connector()
    tiers: tuple[Tier, ...] = ()
    routing: Routing = Routing()
    flow_control: FlowControl = FlowControl()
    rollout: Rollout = Rollout()
    drain: Drain = Drain()
    tenancy: Tenancy = Tenancy()
    tenants: Tenants = Tenants()
    tls: Tls = Tls()
    gateway: Gateway = Gateway()
    observability: Observability = Observability()
    network_policy: Literal["Restricted", "Off"] = "Restricted"
    disruption: Disruption = Disruption()
    scheduling: Literal["", "fcfs", "priority", "srtf", "two-level", "weighted"] = ""
    """Scheduling policy of the workers; empty for their default."""
    class_weights: tuple[ClassWeight, ...] = ()
    image: str = ""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()

    def role(self, name: str) -> Role | None:
        """Return the role with this name, or `None`."""
        return next((role for role in self.roles if role.name == name), None)


class Pool(_Struct, frozen=True):
    """An InferencePool: identity and spec."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: PoolSpec
    keys: str = ""
    """Identifier of the generated keys, from the status; empty for the first keys."""


describe(PoolSpec)


def parse_pool(body: Mapping[str, Any]) -> Pool:
    """Parse an InferencePool object.

    Raises:
        UsageError: the spec does not match the schema; the message names the field.
    """
    meta = body.get("metadata") or {}
    try:
        spec = msgspec.convert(body.get("spec"), PoolSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"pool {meta.get('name', '?')}: {error}", field="spec") from error
    return Pool(
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        generation=meta.get("generation", 0),
        spec=spec,
        keys=str((body.get("status") or {}).get("keys") or ""),
    )


def pods_of(amount: Percentage, total: int, *, up: bool) -> int:
    """Convert a number or percentage of `total` to a number of pods; percentages are rounded up or down."""
    if not amount.endswith("%"):
        return int(amount)
    hundredths = int(amount[:-1]) * total
    return -(-hundredths // 100) if up else hundredths // 100
