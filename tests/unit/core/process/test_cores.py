"""Cores are counted by affinity and by the quota of the control group."""

import os
from pathlib import Path

import pytest

from kvferry.core.process.cores import usable_cores


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
