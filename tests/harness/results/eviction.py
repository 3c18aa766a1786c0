"""Preempted sequences: the cost of computing their KV again or of copying it, and the memory that copies need."""

import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from harness.results.memory import requests
from harness.results.one_worker import serve, settings_of
from harness.results.rows import Outcome
from kvferry.bench.serving.charts import Curve, Panel
from kvferry.bench.workload.lengths import ALPACA, SHAREGPT
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.simulator.worker.replica import SimulatedReplica

_CLOCK = SystemClock()
_TOKENS = 512
_BLOCK_SIZES = (1, 4, 16, 64, 256)
_ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def recompute_or_copy() -> Outcome:
    """Time the recovery of a sequence of 512 tokens by block size: computed again, and copied page by page."""
    found = {size: _recovery_ms(size) for size in _BLOCK_SIZES}
    computed = [recompute for recompute, _ in found.values()]
    spread = max(computed) / min(computed) - 1.0
    dearest = max(recompute / copy for recompute, copy in found.values())
    cells = [f"{size} tokens: {recompute:.0f} ms, copied {copy:.2f} ms" for size, (recompute, copy) in found.items()]
    return Outcome(
        f"{'; '.join(cells)}; computing varies by {100 * spread:.0f} %",
        spread < 0.1 and dearest <= 1.2,
        "pages are copied within host memory, without a bus between, and two cores compute a prompt hundreds of times"
        " slower than they copy its KV. As published, computing does not depend on the block size, and blocks of one"
        " token cost twice as much to copy as large ones."
        " Whether to load or to compute is therefore decided by measured prices and not by a rule",
        [Panel("tokens per block", "milliseconds", [
            Curve("computed again", [(float(size), recompute) for size, (recompute, _) in found.items()]),
            Curve("copied", [(float(size), copy) for size, (_, copy) in found.items()]),
        ])],
    )  # fmt: skip


def _recovery_ms(block_tokens: int) -> tuple[float, float]:
    """Return the median milliseconds of computing the KV of a sequence, and of copying its pages one by one."""
    llm = LLM("smollm2-135m-instruct", device="cpu", block_tokens=block_tokens, kv_memory=64 << 20)
    prompt = [(7919 * index) % 40_000 + 500 for index in range(_TOKENS)]

    def compute() -> None:
        llm.engine.reset_prefix_cache()
        llm.generate([prompt], _ONE)

    pages = np.ones((2 * _TOKENS // block_tokens, llm.block_bytes), np.uint8)
    sources = random.Random(1).sample(range(len(pages)), _TOKENS // block_tokens)
    host = np.zeros((len(sources), llm.block_bytes), np.uint8)

    def copy() -> None:
        for at, source in enumerate(sources):
            host[at] = pages[source]

    return _median_ms(compute, 3), _median_ms(copy, 9)


def _median_ms(act: Callable[[], None], rounds: int) -> float:
    act()
    times = []
    for _ in range(rounds):
        begun = _CLOCK.monotonic()
        act()
        times.append(_CLOCK.monotonic() - begun)
    return 1e3 * statistics.median(times)


def swap_space() -> Outcome:
    """Count the blocks that preempted sequences held before, while more requests arrive than fit."""
    most, pool_blocks, preemptions = 0, 0, 0
    for kind in (SHAREGPT, ALPACA):
        for slots in (3000, 6000):
            found = _evicted_blocks(kind, slots)
            most = max(most, *(evicted for evicted, _, _ in found))
            pool_blocks = max(size for _, size, _ in found)
            preemptions += max(count for *_, count in found)
            if any(evicted > size for evicted, size, _ in found):
                return Outcome(f"{most} blocks of preempted sequences for a pool of {pool_blocks}", passed=False)
    return Outcome(
        f"at most {most} blocks of preempted sequences at a time with pools of up to {pool_blocks} blocks, over "
        f"{preemptions} preemptions",
        preemptions > 0,
    )


def _evicted_blocks(kind: str, slots: int) -> Sequence[tuple[int, int, int]]:
    """Return for each step the blocks that waiting preempted sequences need again, the pool's size, and the preemptions
    so far."""
    found: list[tuple[int, int, int]] = []
    counts: dict[object, int] = {}

    def observe(replica: SimulatedReplica, plan: StepPlan, seconds: float) -> None:
        allocator = replica.scheduler.allocator
        evicted = 0
        for request_id, sequence in replica.scheduler._known.items():
            counts[request_id] = sequence.num_preemptions
            if sequence.num_preemptions and not sequence.kv.table.blocks:
                evicted += -(-sequence.num_tokens // allocator.block_tokens)
        found.append((evicted, allocator.pool.num_blocks, sum(counts.values())))

    serve(requests(kind, 80, 1e6, 1), settings_of(slots=slots), observer=observe)
    return found
