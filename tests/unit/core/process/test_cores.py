"""Cores are counted by affinity and by the quota of the control group."""

import os
from pathlib import Path

import pytest

from kvferry.core.process.cores import core_groups, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("9900000 100000", 8)],
)
def test_the_second_version(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
def test_the_first_version(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("text", ["", "nonsense", "a b", "100000 0"])
def test_unreadable_limits_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == 8
    assert usable_cores(tmp_path / "missing") == 8


def test_groups_of_cores_follow_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in (("node0", "0-2,6-8"), ("node1", "3-5,9-11"), ("node2", "damaged")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert core_groups(2, tmp_path) == [(0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)]
    assert core_groups(4, tmp_path) == [(0, 1, 2), (6, 7, 8), (3, 4, 5), (9, 10, 11)]
    assert core_groups(5, tmp_path) == [(0, 1), (2, 6), (7, 8), (3, 4), (5, 9)]
    assert core_groups(13, tmp_path) == [()] * 13
    assert core_groups(3, tmp_path / "none") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
