"""Turns of the steps of beam searches: the bound, the order, and turns of cancelled steps."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.decide.flow.capacity import UNBOUNDED, WorkerRoom, step_slots
from kvferry.gateway.dispatch.step_turns import StepTurns


def worker(role: str, most: int = 64, used: int = 0) -> WorkerRoom:
    return WorkerRoom(role, most, used, 0, 0.0)


@pytest.mark.parametrize(
    ("workers", "places"),
    [
        ([worker("prefill"), worker("decode", 8)], 32),
        ([worker("prefill"), worker("prefill"), worker("decode")], 64),
        ([worker("both", 10, used=4)], 3),
        ([worker("both"), worker("prefill", 20), worker("decode")], 10),
        ([], 0),
    ],
)
def test_steps_fill_half_of_the_workers_that_compute_prompts(workers: list[WorkerRoom], places: int) -> None:
    assert step_slots(workers) == places


def test_workers_without_a_bound_take_all_steps() -> None:
    assert step_slots([worker("both", 0)]) >= UNBOUNDED // 2


async def test_waiting_steps_begin_by_priority_and_arrival() -> None:
    turns, began = StepTurns(lambda: 1), list[str]()
    await turns.take(0)

    async def step(name: str, priority: int) -> None:
        await turns.take(priority)
        began.append(name)
        turns.give()

    tasks = [asyncio.create_task(step(*each)) for each in (("late", 5), ("a", 0), ("b", 0), ("soon", -5))]
    await asyncio.sleep(0)
    assert began == []
    turns.give()
    await asyncio.gather(*tasks)
    assert began == ["soon", "a", "b", "late"]
    assert turns.num_running == 0


async def test_no_places_are_one() -> None:
    turns = StepTurns(lambda: 0)
    await turns.take(0)
    assert turns.num_running == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30), st.integers(1, 3))
def test_cancelled_steps_leave_no_turn_behind(steps: list[tuple[bool, int]], places: int) -> None:
    async def run() -> None:
        turns, most = StepTurns(lambda: places), 0

        async def step(pauses: int) -> None:
            nonlocal most
            await turns.take(pauses)
            most = max(most, turns.num_running)
            try:
                for _ in range(pauses):
                    await asyncio.sleep(0)
            finally:
                turns.give()

        tasks = [asyncio.create_task(step(pauses)) for _, pauses in steps]
        for task, (is_cancelled, pauses) in zip(tasks, steps, strict=True):
            for _ in range(pauses):
                await asyncio.sleep(0)
            if is_cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns.num_running == 0
        assert most <= places

    asyncio.run(run())
