"""Settings of a simulated gateway, and its requests."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import TicketId
from kvferry.gateway.decide.config import RoutingConfig
from kvferry.gateway.decide.estimates.estimates import Commitment
from kvferry.gateway.decide.flow.fair_queue import QueueEntry
from kvferry.gateway.decide.routing.cached_prefix import PromptNames
from kvferry.simulator.fleet.members import SimulatedMember
from kvferry.simulator.requests.demand import SimRequest
from kvferry.simulator.worker.handoff import SimulatedOfferDesk
from kvferry.simulator.worker.jobs import Job


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a simulated gateway."""

    routing: RoutingConfig = RoutingConfig()  # noqa: RUF009  frozen
    max_streams: int = 1 << 20
    max_queued: int = 1 << 20
    status_seconds: float = 0.5
    """Interval between a worker's statuses in seconds."""
    exact_status: bool = True
    """Whether a status shows the worker's state at that time; otherwise it shows the state after the worker's last
    event, which takes less time to simulate with many workers."""
    seed: int = 0
    """Seed of the policy `random`."""
    latency: float = 0.0002
    """Latency of a message between gateway and worker in seconds."""
    has_map: bool = True
    """Whether the gateway subscribes to the workers' caches; otherwise it predicts from what it has dispatched."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Latency targets in seconds, by name: ttft, itl, tpot, e2el."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of tenants in the fair queue."""
    class_weights: Mapping[int, int] | None = None
    """Weights of priorities in the queue; `None` to serve it strictly by priority."""


@dataclass(slots=True, eq=False)
class RequestRun:
    """One request in the gateway."""

    request: SimRequest
    entry: QueueEntry
    names: PromptNames
    member: SimulatedMember | None = None
    """The worker that serves it now; `None` before the first one."""
    decode: SimulatedMember | None = None
    """The worker that was chosen to decode; `None` before the choice."""
    first: float | None = None
    """Time of the first token at the worker, seconds; `None` before it."""
    last: float | None = None
    """Time of the last token at the latest worker, seconds; `None` before the first token."""
    gaps: "array[float] | None" = None
    commitment: Commitment | None = None
    running: int = 0
    """Number of requests on its worker when its output began."""
    source: SimulatedMember | None = None
    """The worker that has computed its prompt."""
    offer: tuple[SimulatedOfferDesk, TicketId] | None = None
    """The offer of its pages, until it is known to have ended."""
    attempt: int = 0
    excluded: frozenset[str] = frozenset()
    tokens: list[int] | None = None
    """The prompt, and the tokens generated before the hand-off or the loss of a worker."""


def p99(gaps: "array[float] | None") -> float:
    """Return the 99th percentile of the time between tokens in seconds; 0 if there is none."""
    if not gaps:
        return 0.0
    ordered = sorted(gaps)
    return ordered[min(len(ordered) - 1, int(0.99 * (len(ordered) - 1) + 0.999999))]


def run_of(job: Job) -> RequestRun:
    """Return the gateway's record of the request that a job computes.

    Raises:
        InvariantBroken: the job was not sent by a gateway.
    """
    run = job.context
    if not isinstance(run, RequestRun):
        raise InvariantBroken("a job has no requests")
    return run
