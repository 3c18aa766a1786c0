"""Memory of a process: its limit, and the return of what large requests leave."""

import gc
from pathlib import Path

import pytest

from kvferry.core.process.memory import free_memory, resident_memory, usable_memory


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
