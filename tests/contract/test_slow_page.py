"""What docs/slow.md tells a reader to run or to set exists."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/slow.md").read_text("utf-8")
COMMANDS = sorted(set(re.findall(r"`?kvferry ((?:bench |profile )?[a-z]+)", PAGE)))
PROCESSES = ("gateway", "worker", "up")


@cache
def help_of(command: str) -> str:
    arguments = [sys.executable, "-m", "kvferry.cli.main", *command.split()]

    def page(flag: str) -> str:
        return subprocess.run([*arguments, flag], capture_output=True, text=True, check=True, timeout=60).stdout

    short = page("--help")
    return page("--help-all") if "--help-all" in short else short


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_exists(command: str) -> None:
    assert help_of(command).startswith("Usage:")


def test_each_flag_is_one_of_a_process_or_of_a_named_command() -> None:
    known = {flag for command in (*PROCESSES, *COMMANDS) for flag in re.findall(r"--[a-z-]+", help_of(command))}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert len(named) > 10
    assert named <= known


def test_the_list_of_pages_has_it() -> None:
    assert "(slow.md)" in (ROOT / "docs/index.md").read_text("utf-8")
