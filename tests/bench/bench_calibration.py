"""Live and simulated latencies of the same requests, on prefill and decode workers of this machine.

    make bench-calibration                                 1 + 1 and 2 + 2 workers, three loads, three repetitions
    make bench-calibration ARGS="--workers 1 --requests 30"

In each repetition the three loads run in turn, and the workers record their steps (`WorkerAdmin.Profile`). A load is
simulated twice: with a device profile, and its jitter, of every second step of the same run, which shows the error of
the simulation given the steps; and with a profile of the other two loads of the repetition, which also includes the
drift of a shared machine. The time of a message is measured by probes around the run: the smallest HTTP and gRPC calls,
one after the other. Latencies of requests are not used. Rows, with the least and the most of the repetitions, are
appended to tests/bench/results/calibration.csv.
"""

import argparse
import asyncio
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.bench.serving.http_client import Target
from kvferry.bench.serving.run import run
from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.measures import MeasuredAnswer
from kvferry.bench.workload.requests import BenchRequest, Workload
from kvferry.cli.profile_call import profile_worker
from kvferry.core.clock import SystemClock
from kvferry.engine.observe.log_file import read_log
from kvferry.engine.observe.step_log import LoggedStep, StepLog
from kvferry.gateway.decide.config import RoutingConfig
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.rpc.channel import open_channel
from kvferry.simulator.fleet.fleet import SimulatedPool, SimulatedPoolSpec, SimulatedRoleSpec
from kvferry.simulator.fleet.runs import GatewaySettings
from kvferry.simulator.requests.demand import of_trace
from kvferry.simulator.requests.tokens import Tape
from kvferry.simulator.worker.device import LinkProfile, StepWork
from kvferry.simulator.worker.fitting import Measured, fit, residuals
from kvferry.simulator.worker.jobs import ReplicaSettings
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig

RESULTS = Path(__file__).parent / "results" / "calibration.csv"
CLOCK = SystemClock()
TICKET_KEY = "calibration-" * 4
MODEL, BLOCK_TOKENS, BLOCKS = "smollm2-135m-instruct", 16, 1024
KV_TOKEN_BYTES = 23_040
LINK = LinkProfile(bytes_per_second=2e9)
STEPS, MAX_SECONDS = 10_000, 600.0
ROLES = ("prefill", "decode")
QUANTILES = 200
PROBES = 20


@dataclass(frozen=True, slots=True)
class Live:
    """One live run."""

    requests: list[BenchRequest]
    answers: list[MeasuredAnswer]
    steps: dict[str, list[Measured]]
    """Work and time in seconds of each step by role."""
    message_seconds: float


def works(log: StepLog) -> list[Measured]:
    """Return the work and the time in seconds of each step. If a sequence takes part in the next step too, the time
    between the steps is included, because passing on tokens and reading commands also delays tokens.
    """
    found = []
    for step, following in zip(log.steps, [*log.steps[1:], LoggedStep()], strict=True):
        if step.plan:
            both = {item[0] for item in step.plan} & {item[0] for item in following.plan}
            found.append((_work(step), following.begun - step.begun if both else step.seconds))
    return found


def _work(step: LoggedStep) -> StepWork:
    tokens = sum(count for _, _, count, _ in step.plan)
    pairs = sum(n * seen + n * (n + 1) // 2 for _, seen, n, _ in step.plan if n > 1)
    return StepWork(tokens, sum(seen + n for _, seen, n, _ in step.plan), pairs)


async def live(stack: LocalStack, url: str, requests: list[BenchRequest]) -> Live:
    """Send the requests while all workers record."""

    def record(address: str, seconds: float) -> StepLog:
        found = profile_worker(
            address, TICKET_KEY.encode(), None, steps=STEPS, timeout_seconds=seconds, resets_cache=True,
            has_tokens=False,
        )  # fmt: skip
        return read_log(found.log.decode().splitlines())

    seconds = requests[-1].at + 15.0
    names = list(stack.worker_admin)
    before = await probe(stack, url)
    recording = [asyncio.create_task(asyncio.to_thread(record, stack.worker_admin[name], seconds)) for name in names]
    await asyncio.sleep(1.0)
    _, answers = await run(requests, Target(url), CLOCK)
    steps: dict[str, list[Measured]] = {role: [] for role in ROLES}
    for name, task in zip(names, recording, strict=True):
        steps[name.partition("-")[0]] += works(await task)
    failed = [answer.error for answer in answers if answer.error]
    assert not failed, failed[:3]
    return Live(requests, answers, steps, (before + await probe(stack, url)) / 2)


def first_times(one: Live) -> list[float]:
    """Return the time to first token in seconds."""
    return [answer.ttft for answer in one.answers]


def gaps(one: Live) -> list[float]:
    """Return the times between messages in seconds."""
    return [gap for answer in one.answers for gap in answer.gaps]


@dataclass(frozen=True, slots=True)
class Model:
    """Inputs of a simulation, measured by other runs."""

    roles: dict[str, SimulatedRoleSpec]
    latency: float


def model_of(runs: Sequence[Live], workers: int, *, every: int = 1) -> Model:
    """Fit profiles and jitter to every `every`-th step of runs."""
    roles = {}
    for role in ROLES:
        steps = [step for one in runs for step in one.steps[role][::every]]
        found = fit(steps)
        ratios = sorted(residuals(found.profile, steps))
        jitter = tuple(ratios[round(i * (len(ratios) - 1) / (QUANTILES - 1))] for i in range(QUANTILES))
        engine = ReplicaSettings(BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS * KV_TOKEN_BYTES, load_policy=LoadPolicy.ALWAYS)
        roles[role] = SimulatedRoleSpec(role, workers, found.profile, engine, jitter=jitter)
    return Model(roles, statistics.fmean(one.message_seconds for one in runs))


def simulated(model: Model, requests: Sequence[BenchRequest], seed: int) -> SimulatedPool:
    """Simulate the requests; return the pool with their measures."""
    link = LinkProfile(LINK.bytes_per_second, model.latency)
    gateway = GatewaySettings(routing=RoutingConfig(), latency=model.latency, seed=seed)
    pool = SimulatedPool(SimulatedPoolSpec(tuple(model.roles.values()), link, gateway), of_trace(requests, Tape(seed)))
    pool.run()
    return pool


async def probe(stack: LocalStack, url: str) -> float:
    """Return half of the median seconds of a small HTTP call to the gateway and a small gRPC call to a worker."""
    http_times, grpc_times = [], []
    address = next(iter(stack.worker_admin.values()))
    async with httpx.AsyncClient(base_url=url) as client, open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(PROBES + 1):
            begun = CLOCK.monotonic()
            (await client.get("/v1/models")).raise_for_status()
            http_times.append(CLOCK.monotonic() - begun)
            begun = CLOCK.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            grpc_times.append(CLOCK.monotonic() - begun)
    return (statistics.median(http_times[1:]) + statistics.median(grpc_times[1:])) / 2


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, computed as in the simulator."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def repetition(workers: int, rates: Sequence[float], count: int, number: int) -> list[dict[str, float]]:
    """Run all loads once; return live and simulated percentiles of each, in milliseconds."""
    config = StackConfig(
        model=MODEL,
        prefill=workers,
        decode=workers,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        cores=os.cpu_count() or 1,
        threads=1,
        ticket_key=TICKET_KEY,
        worker_flags=(
            "--kv-memory",
            f"{BLOCKS * BLOCK_TOKENS * KV_TOKEN_BYTES}",
            "--async-steps",
            "off",
            "--load-policy",
            "always",
        ),
        gateway_flags=("--kv-prefetch-tokens", "0"),
    )
    stack = LocalStack(config, clock=CLOCK)
    runs = []
    try:
        url = f"http://{(await stack.start()).http}"
        for index, rate in enumerate(rates):
            mix = Workload(num_input=128, num_output=24, spread=0.5)
            runs.append(await live(stack, url, mix.requests(count, Arrivals(rate=rate), 100 * number + index)))
    finally:
        await stack.stop(30.0)
    rows = []
    for index, one in enumerate(runs):
        others = [other for place, other in enumerate(runs) if place != index]
        own = simulated(model_of([one], workers, every=2), one.requests, number).gateway.measures
        drifted = simulated(model_of(others, workers), one.requests, number).gateway.measures
        row = {"message_ms": 1e3 * one.message_seconds}
        for name, values in (("ttft", first_times(one)), ("itl", gaps(one))):
            for percent in (50, 99):
                row[f"{name}_p{percent}_live"] = 1e3 * percentile(values, percent)
                row[f"{name}_p{percent}_simulated"] = 1e3 * getattr(own, name).percentile(percent)
                row[f"{name}_p{percent}_drifted"] = 1e3 * getattr(drifted, name).percentile(percent)
        rows.append(row)
    return rows


async def main(sizes: Sequence[int], rates: Sequence[float], count: int, repetitions: int) -> None:
    """Measure, print and append rows."""
    for workers in sizes:
        found: list[list[dict[str, float]]] = []
        loads = []
        for number in range(repetitions):
            loads.append(os.getloadavg()[0])
            found.append(await repetition(workers, rates, count, number))
        rows = []
        for index, rate in enumerate(rates):
            for name in ("ttft_p50", "itl_p50", "ttft_p99", "itl_p99"):
                lives = [rows[index][f"{name}_live"] for rows in found]
                sims = [rows[index][f"{name}_simulated"] for rows in found]
                errors = [sim / one - 1.0 for sim, one in zip(sims, lives, strict=True)]
                drifted = [rows[index][f"{name}_drifted"] / one - 1.0 for rows, one in zip(found, lives, strict=True)]
                rows.append({
                    "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
                    "workers": f"{workers}+{workers}", "rate": rate, "requests": count, "measure": name,
                    "live_ms": round(statistics.median(lives), 2), "live_least": round(min(lives), 2),
                    "live_most": round(max(lives), 2), "simulated_ms": round(statistics.median(sims), 2),
                    "error": round(statistics.median(errors), 3), "error_least": round(min(errors), 3),
                    "error_most": round(max(errors), 3), "error_of_other_runs": round(statistics.median(drifted), 3),
                    "message_ms": round(statistics.median(rows[index]["message_ms"] for rows in found), 2),
                    "load_average": round(statistics.fmean(loads), 1),
                })  # fmt: skip
                print(" ".join(f"{key}={rows[-1][key]}" for key in list(rows[-1])[3:]), flush=True)
        append_csv(RESULTS, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--rates", type=float, action="append", help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    asyncio.run(main(given.workers or [1, 2], given.rates or [0.4, 0.7, 1.0], given.requests, given.repetitions))
