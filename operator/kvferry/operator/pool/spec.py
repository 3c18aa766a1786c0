"""Spec of an InferencePool as frozen values, with the defaults of the schema.

The CustomResourceDefinition documents the fields and lists the valid names; a test checks that both agree, and that
they agree with the flags of the processes.
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


class CacheSpec(_Struct, frozen=True):
    """Settings of the volume with the model's files."""

    mount_path: str = "/models"
    read_only: bool = True
    persistent_volume_claim: str | UnsetType = UNSET
    host_path: str | UnsetType = UNSET


class ModelSpec(_Struct, frozen=True):
    """The model to serve."""

    name: str
    source: str = ""
    digest: str = ""
    dtype: str = "auto"
    weights: str = "shipped"
    max_model_len: int = 0
    block_tokens: int = 16
    window_pages: Literal["keep", "release"] = "keep"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    cache: CacheSpec | None = None


class ScaleUpSpec(_Struct, frozen=True):
    """Settings for scaling up."""

    stabilization_window_seconds: int = 0


class ScaleDownSpec(_Struct, frozen=True):
    """Settings for scaling down."""

    stabilization_window_seconds: int = 300


class ScaleToZeroSpec(_Struct, frozen=True):
    """Settings for scaling to zero."""

    idle_seconds: int = 600


class ScalingSpec(_Struct, frozen=True):
    """Settings for scaling a role: mode, bounds and targets."""

    mode: Literal["Static", "External", "Auto"] = "Static"
    min_replicas: int = 1
    max_replicas: int = 10
    target_kv_usage: float = 0.7
    target_requests: int = 16
    scale_up: ScaleUpSpec = ScaleUpSpec()
    scale_down: ScaleDownSpec = ScaleDownSpec()
    scale_to_zero: ScaleToZeroSpec = ScaleToZeroSpec()


class RoleEngineSpec(_Struct, frozen=True):
    """Engine settings of the workers of one role."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = ""
    """Data type of the role; empty for that of the model."""
    kv_memory: str = "auto"
    gpu_memory_utilization: float = 0.9
    threads: int = 0
    token_budget: int = 2048
    max_chunk_tokens: int = 512
    max_mixed_tokens: int = 256
    background_steps: int = 100
    max_num_seqs: int = 64
    adapter_slots: int = 8
    max_adapter_rank: int = 64
    adapter_memory: str = "1Gi"
    pin_share: float = 0.25
    retention_share: float = 0.25
    speculation: str = "off"


class ParallelismSpec(_Struct, frozen=True):
    """How a worker divides its model."""

    tensor: int = 1
    """Processes of a pod that compute the model together."""


class RoleSpec(_Struct, frozen=True):
    """One role of worker pods."""

    name: Literal["prefill", "decode", "both"]
    replicas: int = 1
    scaling: ScalingSpec = ScalingSpec()
    engine: RoleEngineSpec = RoleEngineSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    resources: Json = {}
    template: Json = {}

    def bounded(self, replicas: int) -> int:
        """Limit `replicas` to `minReplicas` .. `maxReplicas`; in mode Static, return it unchanged."""
        if self.scaling.mode == "Static":
            return replicas
        return min(max(replicas, self.scaling.min_replicas), self.scaling.max_replicas)


class AdapterSpec(_Struct, frozen=True):
    """A LoRA adapter; requests select it as their model."""

    name: str
    source: str
    digest: str = ""


class ClassWeight(_Struct, frozen=True):
    """The weight of a priority with the request policy `weighted`."""

    priority: int
    weight: int


class EngineSpec(_Struct, frozen=True):
    """Engine settings of all workers."""

    request_policy: str = "fcfs"
    class_weights: tuple[ClassWeight, ...] = ()
    numerics: str = "exact"
    stream_interval: int = 1
    load_policy: str = "price"
    verify_kv: str = "epochs"
    tier_object_tokens: int = 64


class ConnectorSpec(_Struct, frozen=True):
    """Settings of KV transfers between pods."""

    type: str = "nixl"
    offer_seconds: int = 10
    encryption: bool = False


class SecretKey(_Struct, frozen=True):
    """A key of a Secret."""

    name: str
    key: str = "url"


class StorageTierSpec(_Struct, frozen=True):
    """One storage tier for KV."""

    type: str
    size: str = ""
    url: str = ""
    url_secret: SecretKey | None = None


class RoutingSpec(_Struct, frozen=True):
    """Settings for routing requests from the gateway to worker pods."""

    policy: str = "latency"
    prefix_blocks: int = 4
    cache_map_blocks: int = 1 << 22
    skip_prefill_below_tokens: int = 0
    kv_prefetch_tokens: int = 1024


class FlowControlSpec(_Struct, frozen=True):
    """Admission limits and queueing of the gateway."""

    max_streams: int = 1024
    max_queued: int = 4096
    max_queued_bytes: str = "256Mi"
    tenant_order: str = "fewest-samples"
    max_held: int = 256
    hold_seconds: int = 60
    request_timeout_seconds: int = 600


class RolloutSpec(_Struct, frozen=True):
    """Settings for the rollout of a new revision."""

    max_surge: Percentage = "25%"
    max_unavailable: Percentage = "0"
    max_skew: float = 0.25
    paused: bool = False
    rollback_to: str = ""
    progress_deadline_seconds: int = 600
    history_limit: int = 5


class DrainSpec(_Struct, frozen=True):
    """Settings for draining terminating pods."""

    seconds: int = 30
    linger_seconds: int = 5


class InternalKeysSpec(_Struct, frozen=True):
    """Keys between the pool's pods."""

    secret_name: str = ""


class TenantsSpec(_Struct, frozen=True):
    """Keys, shares and quotas of the clients' tenants."""

    secret_name: str = ""


class TlsSpec(_Struct, frozen=True):
    """TLS between the pool's pods."""

    mode: Literal["Off", "Managed", "Secret"] = "Off"
    secret_name: str = ""
    """Secret with tls.crt, tls.key and ca.crt, with mode Secret."""


class ServiceSpec(_Struct, frozen=True):
    """The gateway's Service."""

    type: str = "ClusterIP"
    http_port: int = 80
    grpc_port: int = 9000
    annotations: dict[str, str] = {}


class StateSpec(_Struct, frozen=True):
    """The Redis server that the gateway pods share."""

    url: str = ""
    url_secret: SecretKey | None = None
    max_bytes: str = "256Mi"


class GatewaySpec(_Struct, frozen=True):
    """The gateway pods."""

    replicas: int = 1
    processes: int = 1
    api_keys_secret: str = ""
    tls_secret: str = ""
    client_ca_secret: str = ""
    """Secret with ca.crt, the CA that must have signed clients' certificates; empty if clients need none."""
    state: StateSpec = StateSpec()
    service: ServiceSpec = ServiceSpec()
    resources: Json = {}
    template: Json = {}
    inference_extension: Literal["Off", "Auto"] = "Off"


class ObservabilitySpec(_Struct, frozen=True):
    """Settings for monitoring the pool."""

    pod_monitor: Literal["Off", "Auto"] = "Auto"
    pod_monitor_labels: dict[str, str] = {}
    otlp: str = ""
    trace_sample: float = 0.01
    log_level: str = "warning"
    log_json: bool = False


class DisruptionSpec(_Struct, frozen=True):
    """Settings of the pool's PodDisruptionBudgets."""

    max_unavailable: Percentage = "1"


class PoolSpec(_Struct, frozen=True):
    """The desired state of a pool."""

    model: ModelSpec
    roles: tuple[RoleSpec, ...]
    adapters: tuple[AdapterSpec, ...] = ()
    """Adapters of all roles; changes restart no pods."""
    engine: EngineSpec = EngineSpec()
    connector: ConnectorSpec = ConnectorSpec()
    tiers: tuple[StorageTierSpec, ...] = ()
    routing: RoutingSpec = RoutingSpec()
    flow_control: FlowControlSpec = FlowControlSpec()
    rollout: RolloutSpec = RolloutSpec()
    drain: DrainSpec = DrainSpec()
    internal_keys: InternalKeysSpec = InternalKeysSpec()
    tenants: TenantsSpec = TenantsSpec()
    tls: TlsSpec = TlsSpec()
    gateway: GatewaySpec = GatewaySpec()
    observability: ObservabilitySpec = ObservabilitySpec()
    network_policy: Literal["Restricted", "Off"] = "Restricted"
    disruption: DisruptionSpec = DisruptionSpec()
    image: str = ""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()

    def role(self, name: str) -> RoleSpec | None:
        """Return the role with this name, or `None`."""
        return next((role for role in self.roles if role.name == name), None)


class InferencePool(_Struct, frozen=True):
    """An InferencePool: identity and spec."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: PoolSpec
    keys: str = ""
    """Identifier of the generated keys, from the status; empty for the first keys."""


describe(PoolSpec)


def parse_pool(body: Mapping[str, Any]) -> InferencePool:
    """Parse an InferencePool object.

    Raises:
        UsageError: the spec does not match the schema; the message names the field.
    """
    meta = body.get("metadata") or {}
    try:
        spec = msgspec.convert(body.get("spec"), PoolSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"pool {meta.get('name', '?')}: {error}", field="spec") from error
    return InferencePool(
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
