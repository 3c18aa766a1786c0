"""Policies of tenants, their limits and shares of the fleet, read from the tenants file.

[default]                      # tenants that are not listed, and requests without a key
requests_per_minute = 60

[tenants.search]
keys = ["sha256:9f86d0..."]    # from `kvferry key hash`
weight = 3
priority = [-100, 0]
tokens_per_minute = 200000
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.errors import Forbidden, UnknownModel, UsageError, shortened
from kvferry.core.process.toml_text import parse_toml
from kvferry.core.sampling import MAX_PRIORITY
from kvferry.gateway.decide.flow.controller import QueueBounds

MAX_FILE_BYTES = 4 << 20
MAX_TENANTS = 4096
MAX_KEYS = 64
"""Maximum number of keys of one tenant."""
KEY_PREFIX = "sha256:"
_KEY = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_MODELS = 256
_MAX_AMOUNT = 1e12
_SETTING = "tenants"
_AMOUNTS = ("requests_per_minute", "request_burst", "tokens_per_minute", "token_burst")
_COUNTS = ("concurrent_requests", "max_queued", "max_queued_bytes")
_FIELDS = ("keys", "weight", "priority", "models", *_AMOUNTS, *_COUNTS)


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """Limits and share of one tenant; `None` for no limit."""

    weight: float = 1.0
    """Share of the fleet relative to other tenants of the same priority; greater than 0."""
    priority: tuple[int, int] = (-MAX_PRIORITY, MAX_PRIORITY)
    """Smallest and largest priority number of the tenant's requests."""
    requests_per_minute: float | None = None
    request_burst: float | None = None
    """Requests that may arrive at once; `None` for the number per minute."""
    tokens_per_minute: float | None = None
    """Prompt and output tokens per minute."""
    token_burst: float | None = None
    """Tokens that may be used at once; `None` for the number per minute."""
    concurrent_requests: int | None = None
    """Maximum number of requests that are queued or running."""
    models: frozenset[str] | None = None
    """Names of the models that the tenant may use."""
    max_queued: int | None = None
    max_queued_bytes: int | None = None

    def priority_of(self, requested: int) -> int:
        """Return the priority of a request with priority `requested`; 0, the default, becomes the nearest allowed one.

        Raises:
            Forbidden: the tenant may not use this priority.
        """
        low, high = self.priority
        if low <= requested <= high:
            return requested
        if requested == 0:
            return low if low > 0 else high
        raise Forbidden(
            f"priority {requested} is outside this tenant's range {low} to {high}; use a priority in the range, or "
            "leave it out",
            reason="PRIORITY_FORBIDDEN",
            field="priority",
        )

    def check_model(self, name: str) -> None:
        """Check that the tenant may use a model.

        Raises:
            UnknownModel: the tenant may not use it. As in OpenAI's API, the error does not reveal whether the model
                exists.
        """
        if self.models is not None and name not in self.models:
            raise UnknownModel(
                f"model {shortened(name)!r} does not exist, or this tenant has no access to it; see /v1/models",
                field="model",
            )

    def bounds(self, default: QueueBounds) -> QueueBounds:
        """Return the bounds of the tenant's queue; `default` has the bounds for tenants that set none."""
        return QueueBounds(
            default.requests if self.max_queued is None else self.max_queued,
            default.num_bytes if self.max_queued_bytes is None else self.max_queued_bytes,
        )

    @property
    def request_capacity(self) -> float:
        """Size of the bucket of requests; infinite without a limit."""
        return _capacity(self.requests_per_minute, self.request_burst)

    @property
    def token_capacity(self) -> float:
        """Size of the bucket of tokens; infinite without a limit."""
        return _capacity(self.tokens_per_minute, self.token_burst)


def _capacity(per_minute: float | None, burst: float | None) -> float:
    if per_minute is None:
        return math.inf
    return per_minute if burst is None else burst


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The tenants of a gateway."""

    policies: Mapping[str, TenantPolicy] = field(default_factory=dict)
    default: TenantPolicy = TenantPolicy()
    """Policy of tenants without their own."""
    keys: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    """Tenant by the SHA-256 digest of its key."""

    def policy(self, tenant: str) -> TenantPolicy:
        """Return the policy of a tenant."""
        return self.policies.get(tenant, self.default)


def read_table(text: str) -> TenantTable:
    """Parse a tenants file.

    Raises:
        UsageError: the file is not TOML, or a field is invalid; the message names field, value and remedy, and never
            shows a key.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"the tenants file is not TOML: {error}", field=_SETTING) from None
    for name in document:
        if name not in {"default", "tenants"}:
            raise _wrong(shortened(name), "is unknown; use [default] and [tenants.NAME]")
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict):
        raise _wrong("tenants", "must be a table; use [tenants.NAME]")
    if len(tenants) > MAX_TENANTS:
        raise _wrong("tenants", f"has {len(tenants)} tenants; at most {MAX_TENANTS} are supported")
    policies: dict[str, TenantPolicy] = {}
    keys: dict[bytes, str] = {}
    for name, fields in tenants.items():
        if not _NAME.fullmatch(name):
            raise _wrong(
                f"tenants.{shortened(name)}",
                "is not a valid tenant name; use 1 to 64 letters, digits, dots, hyphens and underscores",
            )
        where = f"tenants.{name}"
        policies[name] = _policy(where, fields)
        for digest in _keys(where, fields.get("keys", [])):
            if keys.setdefault(digest, name) != name:
                raise _wrong(f"{where}.keys", f"has a key that tenant {keys[digest]!r} also has; use different keys")
    default = document.get("default", {})
    if isinstance(default, dict) and "keys" in default:
        raise _wrong("default.keys", "is not allowed; add keys to a named tenant instead")
    return TenantTable(policies, _policy("default", default), keys)


def _policy(where: str, fields: Any) -> TenantPolicy:
    if not isinstance(fields, dict):
        raise _wrong(where, f"must be a table; use [{where}]")
    for name in fields:
        if name not in _FIELDS:
            raise _wrong(f"{where}.{shortened(name)}", f"is unknown; known fields: {', '.join(_FIELDS)}")
    given: dict[str, Any] = {}
    if "weight" in fields:
        given["weight"] = _amount(f"{where}.weight", fields["weight"], low=1e-3, high=1e6)
    for name in _AMOUNTS:
        if name in fields:
            given[name] = _amount(f"{where}.{name}", fields[name], low=1.0, high=_MAX_AMOUNT)
    for name in _COUNTS:
        if name in fields:
            given[name] = int(_amount(f"{where}.{name}", fields[name], low=1, high=_MAX_AMOUNT, whole=True))
    for burst, rate in (("request_burst", "requests_per_minute"), ("token_burst", "tokens_per_minute")):
        if burst in given and rate not in given:
            raise _wrong(f"{where}.{burst}", f"has no effect without {rate}; set both or neither")
    if "priority" in fields:
        given["priority"] = _range(f"{where}.priority", fields["priority"])
    if "models" in fields:
        given["models"] = _models(f"{where}.models", fields["models"])
    return TenantPolicy(**given)


def _amount(where: str, value: Any, *, low: float, high: float, whole: bool = False) -> float:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise _wrong(where, f"must be {kind} from {low:g} to {high:g}, not {shortened(repr(value))}")
    return float(value)


def _range(where: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)
    if not is_pair or not -MAX_PRIORITY <= value[0] <= value[1] <= MAX_PRIORITY:
        raise _wrong(
            where,
            f"must be [smallest, largest] with whole numbers from {-MAX_PRIORITY} to {MAX_PRIORITY}, "
            f"not {shortened(repr(value))}",
        )
    return value[0], value[1]


def _models(where: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise _wrong(where, f"must be a list of model names, not {shortened(repr(value))}; leave it out to allow all")
    if len(value) > _MAX_MODELS:
        raise _wrong(where, f"has {len(value)} names; at most {_MAX_MODELS} are supported")
    return frozenset(value)


def _keys(where: str, value: Any) -> list[bytes]:
    if not isinstance(value, list) or len(value) > MAX_KEYS:
        raise _wrong(f"{where}.keys", f"must be a list of at most {MAX_KEYS} hashes of keys")
    for number, key in enumerate(value):
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise _wrong(
                f"{where}.keys.{number}",
                "is not the hash of a key (not shown here); use the line that `kvferry key hash` "
                "prints: sha256: and 64 hexadecimal digits",
            )
    return [bytes.fromhex(key.removeprefix(KEY_PREFIX)) for key in value]


def _wrong(where: str, what: str) -> UsageError:
    return UsageError(f"{where} {what}", field=_SETTING)
