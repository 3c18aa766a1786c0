"""One worker in virtual time, without a gateway, for comparisons of schedulers and allocators.

The device is OPT-13B on an A100 with 40 GB, by arithmetic: 26 GFLOP per token at half of 312 TFLOP/s, and 800 KiB of KV
per token at 1.555 TB/s. The constant of a step follows from the published mean batch of 30.42 requests at 2 requests
per second (Kwon et al., PagedAttention, 2023, figure 13a) by Little's law: 15.2 s for 338 tokens are 45 ms per step.
Only the paged system's result is used for this constant; the results of the other systems are predictions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.fleet.measures import WeightedHistogram
from kvferry.simulator.requests.demand import SimRequest
from kvferry.simulator.requests.tokens import Output
from kvferry.simulator.worker.device import DeviceProfile
from kvferry.simulator.worker.jobs import Job, ReplicaSettings
from kvferry.simulator.worker.replica import MakeScheduler, Observer, SimulatedReplica
from kvferry.testing.baselines.buddy import BuddyMemory
from kvferry.testing.baselines.schedulers import (
    ReservingScheduler,
    Rule,
    StaticScheduler,
    power_of_two,
    private_pages,
    true_length,
    whole_context,
)

SLOTS = 15_728
"""KV slots of OPT-13B in 12 GB."""
CONTEXT = 2048
BLOCK = 16
A100_OPT_13B = DeviceProfile(step=0.032, token=1.67e-4, kv_token=5.27e-7)
ITERATION_LEVEL = SchedulerLimits(
    token_budget=1 << 20, max_chunk_tokens=1 << 20, max_mixed_tokens=1 << 20, max_num_seqs=256
)
"""Whole prompts are computed in one step, as in the paper's system."""
BASELINES: dict[str, Rule] = {
    "Orca (Max)": whole_context(CONTEXT),
    "Orca (Pow2)": power_of_two(CONTEXT),
    "Orca (Oracle)": true_length,
}
PAGED = "paged"


def reserving(rule: Rule, slots: int = SLOTS) -> MakeScheduler:
    """Return the creator of a baseline that reserves chunks. It has enough pages for all chunks."""

    def make(settings: ReplicaSettings, speculation: Speculation | None) -> Scheduler:
        allocator = private_pages(2 * slots // settings.block_tokens, settings.block_tokens)
        return ReservingScheduler(
            settings.limits, allocator, speculation, memory=BuddyMemory(slots, CONTEXT), rule=rule
        )

    return make


def static(slots: int = SLOTS) -> MakeScheduler:
    """Return the creator of a baseline with static batches, as large as memory permits."""

    def make(settings: ReplicaSettings, speculation: Speculation | None) -> Scheduler:
        allocator = private_pages(2 * slots // settings.block_tokens, settings.block_tokens)
        return StaticScheduler(settings.limits, allocator, speculation, batch=slots // CONTEXT)

    return make


@dataclass(slots=True)
class Served:
    """Measurements of one worker's clients. Implements `simulator.worker.replica.Listener`."""

    replica: SimulatedReplica | None = None
    ttft: WeightedHistogram = field(default_factory=WeightedHistogram)
    itl: WeightedHistogram = field(default_factory=WeightedHistogram)
    e2e: WeightedHistogram = field(default_factory=WeightedHistogram)
    normalized: float = 0.0
    completed: int = 0
    ended_at: float = 0.0
    first_at: dict[str, float] = field(default_factory=dict)
    """Time of the first token of each request."""

    @property
    def normalized_latency(self) -> float:
        """Mean of seconds per output token."""
        return self.normalized / self.completed

    @property
    def mean_batch(self) -> float:
        """Mean number of sequences in a step, over the time of steps."""
        assert self.replica is not None
        counts = self.replica.counts
        return counts.sequence_seconds / counts.busy_seconds

    def first_token(self, job: Job, now: float) -> None:
        self.ttft.add(now - job.arrived)
        self.first_at[job.request_id] = now

    def answered(self, job: Job, now: float) -> None:
        pass

    def fetched(self, job: Job, num_blocks: int, seconds: float) -> None:
        pass

    def declined(self, job: Job) -> None:
        pass

    def gap(self, seconds: float, weight: int) -> None:
        self.itl.add(seconds, weight)

    def exported(self, job: Job, export: Export, now: float) -> None:
        raise AssertionError("no job exports")

    def finished(self, job: Job, now: float) -> None:
        self.completed += 1
        self.e2e.add(now - job.arrived)
        self.normalized += (now - job.arrived) / job.output.count
        self.ended_at = max(self.ended_at, now)


def settings_of(slots: int = SLOTS, block: int = BLOCK, limits: SchedulerLimits = ITERATION_LEVEL) -> ReplicaSettings:
    """Return the settings of a worker with this number of KV slots."""
    return ReplicaSettings(num_blocks=slots // block, block_tokens=block, limits=limits)


def serve(
    requests: Iterable[SimRequest],
    settings: ReplicaSettings,
    *,
    profile: DeviceProfile = A100_OPT_13B,
    make_scheduler: MakeScheduler | None = None,
    observer: Observer | None = None,
    samples: int = 1,
    until: float = float("inf"),
) -> Served:
    """Serve requests on one worker.

    Args:
        samples: number of samples of each request, which arrive together.
        until: virtual time after which the simulation ends.
    """
    clock, served, namers = VirtualClock(), Served(), BlockNamers(b"results")
    replica = served.replica = SimulatedReplica(
        clock, settings, profile, served, lambda tenant: namers.of(
            tenant, fingerprint=b"results", block_tokens=settings.block_tokens
        ), make_scheduler=make_scheduler, observer=observer,
    )  # fmt: skip
    pending = iter(requests)

    def arrive(request: SimRequest) -> None:
        plan()
        for sample in range(samples):
            output = Output(request.output.tape, request.output.place + 101 * sample, request.output.count)
            name = RequestId(str(request.index) if samples == 1 else f"{request.index}/{sample}")
            replica.submit(
                Job(name, request.prompt, len(request.prompt), output, request.at, priority=request.priority)
            )

    def plan() -> None:
        request = next(pending, None)
        if request is not None:
            clock.at(request.at, lambda: arrive(request))

    plan()
    clock.run(until)
    return served
