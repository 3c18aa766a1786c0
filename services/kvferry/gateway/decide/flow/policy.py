"""Policy of a tenant: limits on its requests, and its share of the fleet."""

import math
from dataclasses import dataclass

from kvferry.core.errors import Forbidden, UnknownModel, shortened
from kvferry.core.sampling import MAX_PRIORITY
from kvferry.gateway.decide.flow.controller import QueueBounds


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
