"""Memory of a process: its limit, and the return of what large requests leave."""

import gc
from pathlib import Path

import pytest

from kvferry.core.process.memory import MemoryGrowth, free_memory, resident_memory, usable_memory


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(("text", "limit"), [("1048576", 1 << 20), ("max", None), ("9223372036854771712", None)])
def test_the_limit_of_the_control_group_counts_if_it_is_lower(
    tmp_path: Path, file: str, text: str, limit: int | None
) -> None:
    installed = usable_memory(tmp_path)
    assert installed > 1 << 26
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text + "\n")
    assert usable_memory(tmp_path) == (limit or installed)


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self
        self.pieces = [bytes(2000) for _ in range(20_000)]


def test_memory_of_objects_that_refer_to_each_other_is_returned() -> None:
    free_memory()
    gc.disable()
    try:
        before = resident_memory()
        Cycle()
        grown = resident_memory() - before
        assert grown > 30 << 20
        free_memory()
        assert resident_memory() - before < grown / 4
    finally:
        gc.enable()


def test_a_return_during_requests_does_not_raise_the_base_of_an_idle_process():
    growth = MemoryGrowth(8, 256, idle_base=120, busy_base=120)
    assert growth.is_due(400, busy=True)
    growth.returned(160, busy=True)
    assert not growth.is_due(400, busy=True)
    assert growth.is_due(158, busy=False)
    growth.returned(124, busy=False)
    assert not growth.is_due(128, busy=False)
    assert not growth.is_due(379, busy=True)


def test_memory_that_is_in_use_is_returned_again_ever_more_rarely():
    growth = MemoryGrowth(8, 256, idle_base=120, busy_base=120)
    due = []
    for check in range(300):
        if growth.is_due(200, busy=False):
            due.append(check)
            growth.returned(200, busy=False)
    assert due == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]


def test_growth_of_an_idle_process_is_returned_at_once():
    growth = MemoryGrowth(8, 256, idle_base=120, busy_base=120)
    for _ in range(3):
        growth.is_due(200, busy=False)
        growth.returned(200, busy=False)
    assert not growth.is_due(205, busy=False)
    assert growth.is_due(209, busy=False)


def test_a_process_that_was_busy_repeats_a_return_soon():
    growth = MemoryGrowth(8, 256, idle_base=120, busy_base=120)
    for _ in range(100):
        if growth.is_due(200, busy=False):
            growth.returned(200, busy=False)
    assert not growth.is_due(230, busy=True)
    assert growth.is_due(230, busy=False)  # a message of a request that is being received is part of this return
    growth.returned(230, busy=False)
    assert growth.is_due(230, busy=False)
    growth.returned(121, busy=False)
    assert not any(growth.is_due(128, busy=False) for _ in range(100))


def test_less_memory_lowers_the_base():
    growth = MemoryGrowth(8, 256, idle_base=120, busy_base=120)
    assert not growth.is_due(100, busy=True)
    assert growth.is_due(109, busy=False)
    assert growth.is_due(357, busy=True)
