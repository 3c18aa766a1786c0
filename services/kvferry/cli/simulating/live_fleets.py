"""Runs the fleet of a file on this machine: the same workload, against real processes."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.bench.serving.http_client import Target
from kvferry.bench.serving.run import run
from kvferry.bench.workload.measures import MeasuredAnswer, meets
from kvferry.bench.workload.requests import BenchRequest
from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable, UsageError
from kvferry.core.process.cores import usable_cores
from kvferry.simulator.files.spec import FleetSpec
from kvferry.simulator.fleet.members import BOTH, DECODE, PREFILL
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig

MAX_WORKERS = 16
_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LiveScore:
    """Score of a fleet that ran on this machine."""

    goodputs: tuple[float, ...]
    """Requests per second within the latency targets, by round."""

    @property
    def goodput(self) -> float:
        """Median of `goodputs`."""
        return statistics.median(self.goodputs)


def stack_of(spec: FleetSpec, model: str, threads: int) -> StackConfig:
    """Return the settings of a local stack with the workers of a fleet.

    Args:
        spec: the fleet; all its roles have the same engine settings.
        model: the model that the workers serve.
        threads: compute threads of each worker; 0 for their share of the cores.

    Raises:
        UsageError: the fleet has too many workers for one machine, or roles with different engine settings.
    """
    counts = {role.role: role.replicas for role in spec.pool.roles}
    if sum(counts.values()) > MAX_WORKERS:
        raise UsageError(
            f"the fleet has {sum(counts.values())} workers; at most {MAX_WORKERS} can run on one machine",
            field="role.replicas",
        )
    engines = {role.engine for role in spec.pool.roles}
    if len(engines) > 1:
        raise UsageError("the roles have different engines; live runs need one [engine] for all", field="role.engine")
    engine, routing = spec.pool.roles[0].engine, spec.pool.gateway.routing
    limits = engine.limits
    flags = {
        "--token-budget": limits.token_budget, "--max-chunk-tokens": limits.max_chunk_tokens,
        "--max-mixed-tokens": limits.max_mixed_tokens, "--max-num-seqs": limits.max_num_seqs,
        "--scheduling": limits.scheduling, "--class-weights": limits.class_weights,
        "--block-tokens": engine.block_tokens, "--load-policy": engine.load_policy.value,
    }  # fmt: skip
    # A block has one byte per token if the file does not set `kv_bytes_per_token`.
    if engine.block_bytes > engine.block_tokens:
        flags["--kv-memory"] = engine.num_blocks * engine.block_bytes
    gateway = {
        "--policy": routing.policy, "--prefix-blocks": routing.prefix_blocks,
        "--skip-prefill-below": routing.skip_prefill_below_tokens,
        "--scheduling": limits.scheduling, "--class-weights": limits.class_weights,
    }  # fmt: skip
    return StackConfig(
        model=model,
        prefill=counts.get(PREFILL, 0),
        decode=counts.get(DECODE, 0),
        both=counts.get(BOTH, 0),
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        cores=usable_cores(),
        threads=threads,
        worker_flags=tuple(str(part) for item in flags.items() for part in item),
        gateway_flags=tuple(str(part) for item in gateway.items() for part in item),
    )


def live_requests(spec: FleetSpec, count: int) -> list[BenchRequest]:
    """Return the first requests of a fleet's workload."""
    found: list[BenchRequest] = []
    for request in spec.requests(0):
        if len(found) == count:
            break
        # Ids of a simulation are larger than vocabularies; equal ids stay equal.
        prompt = tuple(300 + token % 4000 for token in request.prompt)
        found.append(BenchRequest(request.at, prompt, request.output.count))
    return found


async def serve(config: StackConfig, requests: Sequence[BenchRequest], clock: Clock) -> list[MeasuredAnswer]:
    """Start the processes, send the requests, and stop the processes.

    Raises:
        Unavailable: no requests were served.
        KvferryError: the processes cannot be started.
    """
    stack = LocalStack(config, clock=clock)
    try:
        addresses = await stack.start()
        _, answers = await run(requests, Target(f"http://{addresses.http}"), clock)
    finally:
        await stack.stop(_STOP_SECONDS)
    if all(answer.error for answer in answers):
        raise Unavailable(f"no requests were served: {answers[0].error}")
    return answers


def goodput(answers: Sequence[MeasuredAnswer], slo: Mapping[str, float]) -> float:
    """Return the requests per second that met all latency targets."""
    end = max((answer.times[-1] for answer in answers if answer.times), default=0.0)
    return sum(meets(answer, slo) for answer in answers) / end if end else 0.0


Serve = Callable[[FleetSpec], float]
"""Runs a fleet once, and returns its goodput."""


def compare(
    fleets: Sequence[FleetSpec], serve_one: Serve, rounds: int, on_run: Callable[[int, float], None] = lambda *_: None
) -> list[LiveScore]:
    """Run fleets in turn; each round begins with a different fleet, so that drifts of the machine affect all equally.

    Args:
        fleets: the fleets.
        serve_one: runs one of them.
        rounds: number of runs per fleet.
        on_run: called with the index of a fleet and its goodput after each run.
    """
    found: list[list[float]] = [[] for _ in fleets]
    for number in range(rounds):
        for place in range(len(fleets)):
            index = (place + number) % len(fleets)
            found[index].append(serve_one(fleets[index]))
            on_run(index, found[index][-1])
    return [LiveScore(tuple(one)) for one in found]


def choose(scores: Sequence[LiveScore], min_gain: float) -> int:
    """Return the fleet with the highest median goodput. The first fleet, which is the file's, is kept unless another is
    better by `min_gain` and its worst round is at most 3 % worse than the first fleet's median.

    Args:
        scores: scores of the fleets; the first one is the file's.
        min_gain: minimum gain over the first fleet, as a fraction.
    """
    base = scores[0].goodput
    better = [
        index
        for index, one in enumerate(scores)
        if one.goodput >= base * (1.0 + min_gain) and min(one.goodputs) >= 0.97 * base and one.goodput > 0.0
    ]
    return max(better, key=lambda index: scores[index].goodput, default=0)
