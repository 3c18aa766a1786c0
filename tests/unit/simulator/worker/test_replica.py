"""A simulated replica plans the same steps as the engine, and its page accounts stay consistent."""

from dataclasses import replace
from random import Random

import pytest
from harness.fakes.small_engine import engine_for

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.policies.policy import POLICIES
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.requests.tokens import Output, Tape
from kvferry.simulator.worker.device import DeviceProfile
from kvferry.simulator.worker.jobs import Job, ReplicaSettings
from kvferry.simulator.worker.replica import SAMPLING, SimulatedReplica

TAPE = Tape(5)
Step = list[tuple[str, int, int, int]]
"""Request, computed, scheduled and sampled tokens of each sequence in a step."""


def step_of(plan: StepPlan) -> Step:
    return [(s.request_id, s.num_computed, s.num_scheduled, s.num_sampled) for s in plan.scheduled]


def arrivals(seed: int) -> list[tuple[int, list[int], Output]]:
    """Return, for each request, the step before which it arrives, its prompt and its output; some share prefixes."""
    draw, prefix = Random(seed), TAPE.unique(0, 40)
    made = []
    for number in range(25):
        own = TAPE.unique(number + 1, draw.randrange(1, 90))
        prompt = [*prefix[: draw.choice([0, 0, 16, 40])], *own]
        made.append((draw.randrange(0, 40), prompt, Output.of(TAPE, number, draw.randrange(1, 30))))
    return sorted(made, key=lambda one: one[0])


class Known:
    """A runner that samples known outputs and records its plans."""

    def __init__(self, outputs: dict[str, Output]) -> None:
        self.outputs, self.steps = outputs, []

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.append(step_of(plan))
        return StepResult({
            s.request_id: SequenceOutput(
                self.outputs[s.request_id].sampled(len(s.token_ids) - s.num_prompt, 1), s.num_scheduled
            )
            for s in plan.scheduled if s.num_sampled
        })  # fmt: skip


class Silent:
    """A listener without hand-offs."""

    def first_token(self, job: Job, now: float) -> None: ...
    def answered(self, job: Job, now: float) -> None: ...
    def gap(self, seconds: float, weight: int) -> None: ...
    def finished(self, job: Job, now: float) -> None: ...


def engine_steps(made: list, limits: SchedulerLimits, blocks: int) -> list[Step]:
    outputs = {str(number): output for number, (_, _, output) in enumerate(made)}
    runner = Known(outputs)
    engine = engine_for(
        runner, num_blocks=blocks, block_tokens=16, max_model_tokens=4096, vocab_size=1 << 31, limits=limits,
        runs_ahead=False,
    )  # fmt: skip
    pending = list(enumerate(made))
    step = 0
    while pending or engine.has_work:
        while pending and pending[0][1][0] <= step:
            number, (_, prompt, output) = pending.pop(0)
            sampling = replace(SAMPLING, max_tokens=output.count)
            engine.add(EngineRequest(RequestId(str(number)), prompt, sampling))
        engine.step()
        step += 1
        assert step < 2000
    return runner.steps


def simulated_steps(made: list, limits: SchedulerLimits, blocks: int) -> list[Step]:
    clock, steps, namers = VirtualClock(), [], BlockNamers(b"k")

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        steps.append(step_of(plan))
        replica.allocator.check_integrity()

    replica = SimulatedReplica(
        clock, ReplicaSettings(blocks, limits=limits), DeviceProfile(step=1.0, token=0.0, kv_token=0.0), Silent(),
        lambda tenant: namers.of(tenant, fingerprint=b"f", block_tokens=16), observer=observe,
    )  # fmt: skip
    for number, (step, prompt, output) in enumerate(made):
        job = Job(RequestId(str(number)), prompt, len(prompt), output, 0.0)
        clock.at(max(0.0, step - 0.5), lambda job=job: replica.submit(job))
    clock.run()
    assert replica.num_jobs == 0
    assert replica.allocator.pool.is_idle
    return steps


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks", [400, 24])
def test_the_engine_and_the_simulator_plan_the_same_steps(policy: str, blocks: int) -> None:
    """Each step takes one second, so a request that arrives before a step of the engine does so in the simulator too.
    With 24 blocks, sequences are preempted.
    """
    limits = SchedulerLimits(128, 48, 64, max_num_seqs=6, scheduling=policy)
    for seed in range(6):
        made = arrivals(seed)
        made[0] = (0, *made[0][1:])  # the engine and the clock start with the first arrival
        first = engine_steps(made, limits, blocks)
        assert simulated_steps(made, limits, blocks) == first
        assert len(first) > 30
