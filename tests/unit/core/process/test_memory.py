"""Memory limit of a process: the machine's memory or the limit of the control group, whichever is lower."""

from pathlib import Path

import pytest

from kvferry.core.process.memory import usable_memory


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
