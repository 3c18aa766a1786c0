"""An InferencePool's spec as frozen values. Defaults are the schema's, so that a file reads as the API server reads it.

Field by field the CustomResourceDefinition is the manual; a test holds the two together.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.core.errors import UsageError

Json = dict[str, Any]
Percentage = str
"""`3` or `25%`."""


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Cache(_Struct, frozen=True):
    """The volume with the model's files."""

    mount_path: str = "/models"
    read_only: bool = True
    persistent_volume_claim: str | UnsetType = UNSET
    host_path: str | UnsetType = UNSET


class Model(_Struct, frozen=True):
    """What is served."""

    name: str
    source: str = ""
    digest: str = ""
    dtype: str = "auto"
    max_tokens: int = 0
    cache: Cache | None = None


class Scaling(_Struct, frozen=True):
    """Who decides how many pods a role has."""

    mode: Literal["Static", "External", "Auto"] = "Static"
    min_replicas: int = 1
    max_replicas: int = 10
    kv_target: int = 70
    requests_target: int = 16
    up_seconds: int = 0
    down_seconds: int = 300
    idle_seconds: int = 600


class Engine(_Struct, frozen=True):
    """How a worker's engine is set up."""

    kv_memory: str = "1GiB"
    threads: int = 0
    token_budget: int = 2048
    max_sequences: int = 64


class Role(_Struct, frozen=True):
    """One kind of worker pods."""

    name: Literal["prefill", "decode", "combined"]
    replicas: int = 1
    scaling: Scaling = Scaling()
    engine: Engine = Engine()
    resources: Json = {}
    template: Json = {}

    def bounded(self, replicas: int) -> int:
        """`replicas` within what this role allows."""
        if self.scaling.mode == "Static":
            return replicas
        return min(max(replicas, self.scaling.min_replicas), self.scaling.max_replicas)


class Connector(_Struct, frozen=True):
    """How KV travels."""

    type: Literal["nixl", "tcp", "shm"] = "nixl"


class SecretKey(_Struct, frozen=True):
    """An entry of a Secret."""

    name: str
    key: str = "url"


class Tier(_Struct, frozen=True):
    """One place for KV beyond the pages."""

    type: Literal["dram", "disk", "redis"]
    size: str = ""
    url: str = ""
    url_secret: SecretKey | None = None


class Routing(_Struct, frozen=True):
    """How the gateway chooses pods."""

    prefix_blocks: int = 4
    block_tokens: int = 16
    skip_prefill_below_tokens: int = 0
    head_start_tokens: int = 1024


class FlowControl(_Struct, frozen=True):
    """What the gateway admits, holds and refuses."""

    max_streams: int = 1024
    max_held: int = 256
    hold_seconds: int = 60
    request_timeout_seconds: int = 600


class Rollout(_Struct, frozen=True):
    """How a change reaches the pods."""

    max_surge: Percentage = "25%"
    max_unavailable: Percentage = "0"
    max_skew: int = 25
    paused: bool = False
    rollback_to: str = ""
    progress_deadline_seconds: int = 600
    history_limit: int = 5


class Drain(_Struct, frozen=True):
    """How pods stop."""

    seconds: int = 30
    linger_seconds: int = 5


class Tenancy(_Struct, frozen=True):
    """Who shares what."""

    keys_secret: str = ""


class Service(_Struct, frozen=True):
    """The gateway's Service."""

    type: str = "ClusterIP"
    http_port: int = 80
    grpc_port: int = 9000
    annotations: dict[str, str] = {}


class Gateway(_Struct, frozen=True):
    """The pods that clients talk to."""

    replicas: int = 1
    api_keys_secret: str = ""
    tls_secret: str = ""
    service: Service = Service()
    resources: Json = {}
    template: Json = {}
    inference_extension: Literal["Off", "Auto"] = "Off"


class Observability(_Struct, frozen=True):
    """What is measured by whom."""

    pod_monitor: Literal["Off", "Auto"] = "Auto"
    pod_monitor_labels: dict[str, str] = {}


class Disruption(_Struct, frozen=True):
    """What evictions may take away at once."""

    max_unavailable: Percentage = "1"


class PoolSpec(_Struct, frozen=True):
    """All that is wanted of a pool."""

    model: Model
    roles: tuple[Role, ...]
    connector: Connector = Connector()
    tiers: tuple[Tier, ...] = ()
    routing: Routing = Routing()
    flow_control: FlowControl = FlowControl()
    rollout: Rollout = Rollout()
    drain: Drain = Drain()
    tenancy: Tenancy = Tenancy()
    gateway: Gateway = Gateway()
    observability: Observability = Observability()
    network_policy: Literal["Restricted", "Off"] = "Restricted"
    disruption: Disruption = Disruption()
    image: str = ""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()

    def role(self, name: str) -> Role | None:
        """The role called `name`, if there is one."""
        return next((role for role in self.roles if role.name == name), None)


class Pool(_Struct, frozen=True):
    """A pool as the operator works with it."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: PoolSpec


def parse_pool(body: Mapping[str, Any]) -> Pool:
    """The pool in an object of the API, or in a file.

    Raises:
        UsageError: the spec is not one that the schema admits, naming the field.
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
    )


def pods_of(amount: Percentage, total: int, *, up: bool) -> int:
    """How many of `total` pods `amount` is; a percentage is rounded up or down."""
    if not amount.endswith("%"):
        return int(amount)
    hundredths = int(amount[:-1]) * total
    return -(-hundredths // 100) if up else hundredths // 100
