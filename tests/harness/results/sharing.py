"""Sharing of pages between the samples of a request."""

from functools import cache
from statistics import fmean

from harness.results.memory import requests
from harness.results.one_worker import serve, settings_of
from harness.results.rows import Outcome
from kvferry.bench.workload.lengths import ALPACA, SHAREGPT
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.simulator.worker.replica import SimulatedReplica

SAMPLES = (2, 4, 6)
ORIGINAL = {2: 6.09, 4: 8.53, 6: 9.79}


@cache
def _sharing(kind: str, count: int, rate: float, samples: int) -> tuple[float, float]:
    """Return the share of pages that sharing saves, and that of prompts in the pages in use, over time."""
    saved: list[tuple[float, float]] = []
    of_prompts: list[tuple[float, float]] = []

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        needed = sum(len(item.block_ids) for item in plan.scheduled)
        pages: dict[int, bool] = {}
        for item in plan.scheduled:
            last = -(-item.num_prompt // replica.settings.block_tokens)
            for index, page in enumerate(item.block_ids):
                pages[page] = index < last
        saved.append((1.0 - len(pages) / needed, seconds))
        of_prompts.append((sum(pages.values()) / len(pages), seconds))

    serve(requests(kind, count, rate, 1), settings_of(), observer=observe, samples=samples)
    return _mean(saved), _mean(of_prompts)


def _mean(values: list[tuple[float, float]]) -> float:
    return fmean([value for value, _ in values], [seconds for _, seconds in values])


def saved_pages() -> Outcome:
    """Measure the pages that are saved by sharing prompts between samples."""
    alpaca = {n: 100 * _sharing(ALPACA, 200, 8.0 / n, n)[0] for n in SAMPLES}
    sharegpt = {n: 100 * _sharing(SHAREGPT, 24, 0.6 / n, n)[0] for n in SAMPLES}
    far = [n for n in SAMPLES if abs(alpaca[n] - ORIGINAL[n]) > 3]
    is_rising = list(sharegpt.values()) == sorted(sharegpt.values())
    shown = "; ".join(
        f"{kind} " + ", ".join(f"{saved:.1f} % ({n})" for n, saved in found.items())
        for kind, found in (("alpaca", alpaca), ("sharegpt", sharegpt))
    )
    why = (
        "full blocks of a prompt are shared from the first step on, and a sample computes its last, partly filled "
        "block by itself instead of copying it; with prompts of 19 tokens that block is a large part"
    )
    return Outcome(shown, not far and is_rising, why if far or not is_rising else "")


def prompt_share() -> Outcome:
    """Measure the share of prompts in the KV memory with two samples, for which no result was published."""
    found = {kind: 100 * _sharing(kind, count, rate / 2, 2)[1] for kind, count, rate in (
        (ALPACA, 200, 8.0), (SHAREGPT, 24, 0.6),
    )}  # fmt: skip
    shown = ", ".join(f"{share:.1f} % ({kind})" for kind, share in found.items())
    return Outcome(shown, all(0 < share < 100 for share in found.values()), "the original's length mix is not stated")
