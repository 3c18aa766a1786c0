"""docs/faults.md from the rows that the last run measured."""

from collections.abc import Mapping

import msgspec

from kvferry.bench.commit import ROOT
from kvferry.testing.faults.cases import CASES, GROUPS, Case
from kvferry.testing.faults.trial import Row

RESULTS = ROOT / "build" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"

_HEAD = """# Faults

Every fault that the hand-off, the gateway and the tiers are made for, done to real processes under running requests:
four at a time, prompts of 130 to 260 tokens, the tiny model, few pages. In every case each token that a client sees is
the one engine's; a request that does not end right ends with `UNAVAILABLE`, and only where the table says that it may;
no request takes longer than {request:.0f} s; {normal:.0f} s after the fault at the latest, the service uses again what
was missing; and afterwards no worker holds anything. The tests fail otherwise. These bounds are against hanging; the
seconds in the table are what one run measured on {machine}, shared with other work, commit {commit}.

```sh
make faults    # does it all, and writes this page; as root
```

- **right, failed**: requests that were running when the fault began, or began before everything was normal again.
- **longest**: of these, seconds.
- **normal**: seconds from the end of the fault (of a crash: from the crash) until every worker has taken part in a
  hand-off again, or the tier was loaded from again.
- **idle**: seconds from the last request's end until every worker had given back everything.
- **held**: the most that was seen held at a time, by all workers together, until it was normal; they are looked at ten
  times a second, and one that is frozen does not say.
"""
_COLUMNS = ("fault", "expected", "right", "failed", "longest", "normal", "idle", "held at most")
_STACKS: Mapping[str, str] = {
    "shm": "One P, two D, connector `shm`",
    "nixl": "One P, two D, connector `nixl`",
    "tcp": "One P, two D, connector `tcp`",
    "redis": "One P, one D, tier `redis`",
    "dram + redis": "One P, one D, tiers `dram` and `redis`",
    "disk": "One P, one D, tier `disk`",
    "tcp link": "P in a network namespace of its own, two D, connector `tcp`",
}


class Results(msgspec.Struct):
    """What was measured, by case, and where."""

    machine: str = ""
    commit: str = ""
    rows: dict[str, Row] = {}


def read() -> Results:
    """What earlier tests have measured; empty when there is nothing."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results) if RESULTS.exists() else Results()


def record(row: Row, machine: str, commit: str) -> None:
    """Keep a row, beside those of other cases."""
    results = read()
    known = {case.name for case in CASES}
    rows = {name: old for name, old in results.rows.items() if name in known} | {row.name: row}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(Results(machine, commit, rows))) + b"\n")


def render(results: Results) -> str:
    """The page.

    Raises:
        KeyError: a case was not measured.
    """
    most = max(CASES, key=lambda case: case.request_within), max(CASES, key=lambda case: case.normal_within)
    parts = [
        _HEAD.format(
            request=most[0].request_within,
            normal=most[1].normal_within,
            machine=results.machine,
            commit=results.commit,
        )
    ]
    for group in GROUPS:
        parts += [f"\n## {_STACKS[group]}\n\n", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
        parts += [_line(_cells(case, results.rows[case.name])) for case in CASES if case.group == group]
        notes = [results.rows[case.name].note for case in CASES if case.group == group]
        parts += [f"\n{note}\n" for note in notes if note]
    return "".join(parts)


def promised(page: str) -> list[tuple[str, str, str]]:
    """Stack, fault and expectation of each row of a page."""
    titles = {title: group for group, title in _STACKS.items()}
    found, group = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            group = titles.get(line.removeprefix("## "), line)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in {"---", _COLUMNS[0]}:
            found.append((group, cells[0], cells[1]))
    return found


def _cells(case: Case, row: Row) -> list[str]:
    held = ", ".join(f"{number} {kind}" for kind, number in sorted(row.held.items()))
    seconds = [f"{value:.1f}" for value in (row.longest_seconds, row.normal_seconds, row.idle_seconds)]
    return [case.fault, case.expected, str(row.num_right), str(row.num_failed), *seconds, held]


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return f"| {' | '.join(cells)} |\n"
