"""Slots of adapters, and admission that passes over sequences whose adapter has none."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvferry.core.errors import InvariantBroken
from kvferry.core.hashing import BlockNamers, cache_scope
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT, AdapterSlots
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult

BLOCK = 4


def adapter(number: int) -> AdapterId:
    return AdapterId(f"a{number}", number.to_bytes(32, "little"))


def test_the_least_recently_used_idle_adapter_is_replaced() -> None:
    slots = AdapterSlots(2)
    assert [slots.take(adapter(0)), slots.take(adapter(1))] == [0, 1]
    assert not slots.can_take(adapter(2))
    with pytest.raises(InvariantBroken, match="all 2 adapter slots"):
        slots.take(adapter(2))
    slots.give_back(adapter(1))
    slots.give_back(adapter(0))
    assert slots.take(adapter(2)) == 1
    assert slots.take(adapter(0)) == 0, "adapter 0 kept its slot while it was idle"
    assert slots.take_activations() == [(0, adapter(0)), (1, adapter(2))], (
        "adapter 1 was replaced before a step, so its weights are not copied"
    )
    assert (slots.num_activations, slots.num_evictions, slots.num_users) == (3, 1, 2)


def test_a_forgotten_adapter_frees_its_slot_only_when_it_is_idle() -> None:
    slots = AdapterSlots(1)
    slots.take(adapter(0))
    slots.forget(adapter(0))
    assert slots.holds(adapter(0))
    slots.give_back(adapter(0))
    slots.forget(adapter(0))
    assert not slots.holds(adapter(0))
    assert slots.take_activations() == []


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60), st.integers(1, 4))
def test_a_slot_has_one_adapter_and_users_keep_theirs(moves: list[tuple[int, bool]], num_slots: int) -> None:
    slots = AdapterSlots(num_slots)
    held: dict[AdapterId, tuple[int, int]] = {}
    weights: dict[int, AdapterId] = {}
    for number, takes in moves:
        one = adapter(number)
        if takes and slots.can_take(one):
            slot = slots.take(one)
            assert 0 <= slot < num_slots
            weights |= dict(slots.take_activations())
            assert weights[slot] == one
            assert held.get(one, (slot, 0))[0] == slot
            held[one] = (slot, held.get(one, (slot, 0))[1] + 1)
        elif one in held:
            slots.give_back(one)
            slot, users = held.pop(one)
            if users > 1:
                held[one] = (slot, users - 1)
        assert len({slot for slot, _ in held.values()}) == len(held) <= num_slots
        assert slots.num_users == sum(users for _, users in held.values())


def a_scheduler(num_slots: int, limits: SchedulerLimits | None = None) -> Scheduler:
    allocator = Allocator(BlockPool(256), PrefixIndex(), block_tokens=BLOCK)
    return Scheduler(limits or SchedulerLimits(max_num_seqs=8), allocator, slots=AdapterSlots(num_slots))


def a_sequence(name: str, number: int | None, *, tokens: int = 3, outputs: int = 2) -> Sequence:
    own = None if number is None else adapter(number)
    namer = BlockNamers(b"k").of(cache_scope("", "", own), fingerprint=b"f", block_tokens=BLOCK)
    params = SamplingParams(temperature=0.0, max_tokens=outputs)
    prompt = [hash(name) % 90 + i for i in range(tokens)]
    return Sequence(
        SequenceRequest(RequestId(name), tokens, params, namer, tokens + outputs, frozenset(), adapter=own), prompt
    )


def run_step(scheduler: Scheduler) -> list[str]:
    """Run a step; return the requests in it."""
    plan = scheduler.schedule()
    scheduler.slots.take_activations()
    used = {item.adapter_slot for item in plan.scheduled} - {NO_SLOT}
    assert len(used) <= scheduler.slots.num_slots
    outputs = {
        item.request_id: SequenceOutput((SampledToken(1, 0.0),), item.num_scheduled)
        for item in plan.scheduled
        if item.num_sampled
    }
    scheduler.update(StepPlan(plan.scheduled), StepResult(outputs))
    return [str(item.request_id) for item in plan.scheduled]


def test_a_sequence_without_a_slot_is_passed_over() -> None:
    scheduler = a_scheduler(1)
    for name, number in (("first", 0), ("waits", 1), ("base", None), ("same", 0)):
        scheduler.add(a_sequence(name, number))
    assert set(run_step(scheduler)) == {"first", "base", "same"}
    while not scheduler.is_idle:
        last = run_step(scheduler)
    assert last == ["waits"]
    assert scheduler.slots.num_users == 0


def test_a_stream_of_requests_for_active_adapters_starves_none() -> None:
    scheduler = a_scheduler(1)
    scheduler.add(a_sequence("popular-0", 0, outputs=5))
    run_step(scheduler)
    scheduler.add(a_sequence("rare", 1))
    for number in range(1, 400):
        scheduler.add(a_sequence(f"popular-{number}", 0, outputs=5))
        if "rare" in run_step(scheduler):
            break
    else:
        pytest.fail("the requests of the rare adapter starved")
    assert number < 100


def test_rows_of_one_adapter_are_adjacent() -> None:
    scheduler = a_scheduler(3)
    for index in range(6):
        scheduler.add(a_sequence(f"r{index}", index % 3))
    plan = scheduler.schedule()
    slots = [item.adapter_slot for item in plan.scheduled]
    assert slots == sorted(slots)
    assert len(set(slots)) == 3


def test_aborted_and_preempted_sequences_release_their_slots() -> None:
    scheduler = a_scheduler(2)
    for index in range(2):
        scheduler.add(a_sequence(f"r{index}", index, outputs=9))
    run_step(scheduler)
    scheduler.abort(RequestId("r0"))
    assert scheduler.slots.num_users == 1
    scheduler.abort(RequestId("r1"))
    assert scheduler.slots.num_users == 0
    assert scheduler.is_idle
