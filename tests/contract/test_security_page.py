"""The table of methods in docs/security.md equals the access table, and the tests that it names exist and fit."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvferry.rpc.access.table import ALLOWED, CallerRole

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text("utf-8")
PROOFS = re.findall(r"^\| ([^|]+) \| ((?:`tests/[^`|]+`(?:, )?)+) \|$", PAGE, re.MULTILINE)


def rows(title: str) -> Iterator[list[str]]:
    """Yield the cells of the table whose head begins with `title`."""
    table = PAGE[PAGE.index(f"| {title} |") :].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def documented() -> Mapping[str, frozenset[CallerRole]]:
    """Return the roles of each method by the page; a service without a method stands for all its methods."""
    found: dict[str, frozenset[CallerRole]] = {}
    for names, *cells in rows("methods"):
        if set(cells) == {"open"}:
            continue
        roles = frozenset(role for role, cell in zip(CallerRole, cells, strict=True) if cell == "yes")
        service = ""
        for name in re.findall(r"`([\w.]+)`", names):
            service, _, method = name.partition(".") if "." in name or not service else (service, "", name)
            methods = [method] if method else [m.rpartition("/")[2] for m in ALLOWED if f".{service}/" in m]
            assert methods, f"{name} is no method or service"
            for one in methods:
                full = f"/kvferry.v1.{service}/{one}"
                assert full not in found, f"{full} is in two rows"
                found[full] = roles
            service = service if method else ""
    return found


def test_the_table_of_methods_is_the_access_table() -> None:
    head = PAGE[PAGE.index("| methods |") :].splitlines()[0]
    assert head == f"| methods | {' | '.join(CallerRole)} |"
    assert documented() == ALLOWED


def test_the_page_has_proofs() -> None:
    assert len(PROOFS) > 15
    assert PAGE.count("| `tests/") == len(PROOFS)


@pytest.mark.parametrize(("promise", "files"), PROOFS, ids=[promise[:50] for promise, _ in PROOFS])
def test_each_named_test_exists_and_is_about_the_promise(promise: str, files: str) -> None:
    """The test's file has the words of the promise that are subjects of this project."""
    subjects = ("tenant", "scope", "ticket", "certificate", "Secret", "API key", "adapter")
    text = ""
    for name in re.findall(r"`([^`]+)`", files):
        assert (ROOT / name).is_file(), f"{name} does not exist"
        text += (ROOT / name).read_text("utf-8")
    for subject in subjects:
        if subject in promise:
            assert re.search(subject.replace(" ", "[ _]"), text, re.IGNORECASE), f"{files} has no {subject}"
