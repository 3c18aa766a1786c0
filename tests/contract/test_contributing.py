"""CONTRIBUTING.md and what runs on every change say the same as the files that they name."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def test_nothing_is_run_a_second_time() -> None:
    run = (ROOT / ".ci/run").read_text("utf-8")
    for words in ("last-failed", "--lf", "|| make", "reruns"):
        assert words not in run


def test_the_named_targets_exist() -> None:
    named = {
        word
        for line in re.findall(r"make ([a-z -]+)", PAGE)
        for word in line.split()
        if re.fullmatch(r"[a-z][a-z-]+", word)
    }
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {"test", "lock", "setup", "proto", "test-cluster", "test-long", "test-gpu"} <= named & targets


def test_the_page_says_how_to_select_tests_and_to_raise_a_dependency() -> None:
    for words in ('make test ARGS="', "ifdef ARGS"):
        assert words in PAGE + MAKEFILE
    assert "--upgrade-package" in PAGE


def test_the_version_is_one() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    chart = yaml.safe_load((ROOT / "charts/kvferry/Chart.yaml").read_text("utf-8"))
    assert {version, chart["version"], chart["appVersion"]} == {version}
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)


def test_named_files_exist() -> None:
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.[a-z]+|[a-z]+\.toml)`", PAGE):
        assert any(path.is_file() for path in (ROOT / name, ROOT / "services/kvferry" / name)), name
