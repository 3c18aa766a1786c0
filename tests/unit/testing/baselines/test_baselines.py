"""Baselines of published comparisons: buddy chunks, reservations, static batches."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from harness.results.one_worker import BASELINES, CONTEXT, reserving, serve, settings_of, static
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import LengthMix
from kvferry.core.errors import InvariantBroken
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.simulator.requests.demand import Demand
from kvferry.simulator.requests.tokens import Tape
from kvferry.testing.baselines.buddy import MIN_CHUNK, BuddyMemory

TAPE = Tape(0)
NAMER = BlockNamer(tenant=b"", fingerprint=b"", block_tokens=16)


def a_sequence(num_prompt: int, num_output: int) -> Sequence:
    return Sequence(
        SequenceRequest(RequestId("r"), num_prompt, SamplingParams(), NAMER, num_prompt + num_output, frozenset()),
        [1] * num_prompt,
    )


@settings(max_examples=50, deadline=None)
@given(slots=st.integers(16, 5000), seed=st.integers(0, 99))
def test_chunks_never_overlap_and_all_are_freed(slots: int, seed: int) -> None:
    memory, draw, held = BuddyMemory(slots, 2048), Random(seed), []
    largest = max(memory._free)
    for _ in range(200):
        if held and draw.random() < 0.45:
            memory.give(held.pop(draw.randrange(len(held))))
        else:
            size = draw.randrange(1, largest + 1)
            fits, chunk = memory.fits(size), memory.take(size)
            assert fits == (chunk is not None)
            if chunk is not None:
                assert chunk[1] == memory.size_of(size) >= size
                held.append(chunk)
        taken = [slot for start, size in held for slot in range(start // MIN_CHUNK, (start + size) // MIN_CHUNK)]
        assert len(taken) == len(set(taken))
        assert max(taken, default=0) * MIN_CHUNK < slots
        assert memory.num_taken == sum(size for _, size in held)
    free = sum(size * len(starts) for size, starts in BuddyMemory(slots, 2048)._free.items())
    for chunk in held:
        memory.give(chunk)
    assert sum(size * len(starts) for size, starts in memory._free.items()) == free
    assert {size for size, starts in memory._free.items() if starts} == {
        size for size, starts in BuddyMemory(slots, 2048)._free.items() if starts
    }


def test_a_chunk_beyond_the_largest_is_an_error() -> None:
    with pytest.raises(InvariantBroken, match="2049 slots"):
        BuddyMemory(4096, 2048).take(2049)


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "expected"),
    [(7, 25, {"Orca (Max)": 2048, "Orca (Pow2)": 64, "Orca (Oracle)": 32}),
     (1024, 200, {"Orca (Max)": 2048, "Orca (Pow2)": 2048, "Orca (Oracle)": 2048})],
)  # fmt: skip
def test_reservations_are_those_of_the_paper(num_prompt: int, num_output: int, expected: dict[str, int]) -> None:
    """An output of 25 tokens reserves 32 with Pow2; a prompt of 1,024 tokens reserves the whole context with
    each rule.
    """
    memory = BuddyMemory(1 << 16, CONTEXT)
    sequence = a_sequence(num_prompt, num_output)
    assert {name: memory.size_of(rule(sequence)) for name, rule in BASELINES.items()} == expected
    assert BASELINES["Orca (Pow2)"](a_sequence(7, 25)) == 7 + 32


def drawn(count: int = 60) -> list:
    return list(Demand(LengthMix("alpaca"), count, Arrivals(rate=30.0)).requests(TAPE, 1))


@pytest.mark.parametrize("make", [*(reserving(rule, 4096) for rule in BASELINES.values()), static(4096)])
def test_every_request_ends_and_every_chunk_is_freed(make: Callable) -> None:
    served = serve(drawn(), settings_of(slots=4096), make_scheduler=make)
    assert served.completed == 60
    assert served.replica.allocator.pool.is_idle
    memory = getattr(served.replica.scheduler, "memory", None)
    assert memory is None or memory.num_taken == 0


def test_reserving_the_context_bounds_the_batch() -> None:
    most = 0

    def observe(replica: object, plan: object, seconds: float) -> None:
        nonlocal most
        most = max(most, len(plan.scheduled))

    serve(drawn(), settings_of(slots=4096), make_scheduler=reserving(BASELINES["Orca (Max)"], 4096), observer=observe)
    assert most == 2


@pytest.mark.parametrize(("maximum", "prompt", "future", "wasted"), [(2048, 7, 2, 2038), (512, 3, 1, 507)])
def test_a_reservation_of_the_maximum_wastes_most_of_its_slots(
    maximum: int, prompt: int, future: int, wasted: int
) -> None:
    # Kwon et al., PagedAttention, figure 3: slots of the prompt, of this step's token, of future tokens, the rest.
    chunk = BuddyMemory(4096, 2048).take(maximum)
    assert chunk is not None
    used = prompt + 1 + future
    assert chunk[1] - used == wasted
    index = PrefixIndex()
    alloc = Allocator(BlockPool(256, on_reuse=index.forget), index, block_tokens=16)
    assert alloc.blocks_for(used) * 16 - used < 16, "paged, less than a block"


def test_a_static_batch_runs_to_its_end() -> None:
    batches: list[set[str]] = []

    def observe(replica: object, plan: object, seconds: float) -> None:
        names = {item.request_id for item in plan.scheduled}
        if not batches or not names <= batches[-1]:
            assert not batches or not names & batches[-1], "a running batch got a new request"
            batches.append(names)

    serve(drawn(20), settings_of(slots=3 * CONTEXT), make_scheduler=static(3 * CONTEXT), observer=observe)
    assert sum(map(len, batches)) == 20
    assert max(map(len, batches)) == 3


@pytest.mark.parametrize("make", [None, reserving(BASELINES["Orca (Pow2)"], 2048), static(4096)])
def test_runs_of_steps_while_requests_wait_give_the_times_of_single_steps(make: Callable | None) -> None:
    limits = SchedulerLimits(4096, 4096, 4096, max_num_seqs=4)
    found = []
    for takes_runs in (True, False):
        served = serve(
            drawn(40), replace(settings_of(slots=4096, limits=limits), takes_runs=takes_runs), make_scheduler=make
        )
        found.append((served.e2e._buckets, served.itl._buckets, served.replica.counts.steps))
    assert found[0] == found[1]
