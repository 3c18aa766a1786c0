"""Reports of a gateway: readiness, the state of its fleet, and the overview of the dashboard."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from kvferry.core.clock import Clock
from kvferry.core.ids import Incarnation
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.fleet_report import fleet_report
from kvferry.gateway.fleet.membership import Knowledge, Membership
from kvferry.gateway.fleet.pool_api import PoolApi
from kvferry.gateway.fleet.readiness import can_serve, notes
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.observe.dashboard.history import History
from kvferry.gateway.observe.dashboard.running import RunningSample, oldest
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.rpc.tls.pool_tls import PoolTls


@dataclass(slots=True)
class GatewayStatus:
    """Reports of one gateway."""

    incarnation: Incarnation
    clock: Clock
    started: float
    """Monotonic seconds."""
    model_name: str
    max_model_tokens: int
    fleet: Fleet
    membership: Membership
    pool: PoolApi | None
    holding: Holding
    waker: Waker | None
    gate: FlowGate
    cache_map: CacheMap
    instruments: GatewayInstruments
    history: History
    pool_tls: PoolTls | None
    runs: Callable[[], Collection[SampleRun]]
    """Function that returns the samples and searches that have not ended."""
    is_draining: bool = False

    @property
    def would_take(self) -> bool:
        """Whether a new request is accepted; true even for a pool scaled to zero, since a held request scales it up."""
        if self.pool is not None:
            return self.membership.state.state is not Knowledge.UNKNOWN
        return can_serve(self.fleet)

    def readiness(self) -> tuple[bool, Sequence[str]]:
        """Return whether a request would be served, and a note for each worker that accepts no requests."""
        if self.is_draining:
            return False, ["this gateway is draining"]
        paused = self.fleet.rule.note(self.clock.wall())
        found = [*([paused] if paused else []), *self.membership.notes(), *notes(self.fleet)]
        if self.pool is not None and not can_serve(self.fleet):
            found.append(
                f"pool {self.pool.pool} has no workers that accept requests; {self.holding.num_held} requests are "
                "waiting"
            )
        return self.would_take, found

    def report(self) -> Mapping[str, object]:
        """Return the JSON object of `/fleet`."""
        return fleet_report(
            self.fleet.views(),
            gateway=self.incarnation,
            pool="" if self.pool is None else str(self.pool.pool),
            held=self.holding.num_held,
            source=self.membership.state,
            wake_failure="" if self.waker is None else self.waker.failure,
            handoffs=self.instruments.handoff_counts(),
            model_tokens=self.max_model_tokens,
            cache_map=self.cache_map,
            flow=self.gate.report(),
            certificate_not_after=0.0 if self.pool_tls is None else self.pool_tls.not_after,
        )

    def note_totals(self) -> None:
        """Add a reading of the instruments to the history."""
        self.history.add(self.clock.monotonic(), self.instruments.totals())

    def overview(self) -> Mapping[str, object]:
        """Return the JSON object of the dashboard: what is served by which version for how long, and the history."""
        now = self.clock.monotonic()
        return {
            "model": self.model_name,
            "version": version("kvferry"),
            "uptime_seconds": round(now - self.started, 3),
            **self.history.overview(now, self.instruments.totals()),
        }

    def running(self) -> tuple[list[RunningSample], int]:
        """Return the oldest samples and waiting requests, oldest first, and the number of those left out."""
        return oldest(self.runs(), self.gate.waiting, self.clock.monotonic())
