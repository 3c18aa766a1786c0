"""Generates docs/faults.md from the results of the last run."""

from collections.abc import Mapping

import msgspec

from harness.faults.cases import CASES, GROUPS, Case
from harness.faults.trial import Row
from kvferry.bench.commit import ROOT

RESULTS = ROOT / "build" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"

_HEAD = """# Faults

The faults that the hand-off, the gateway and the tiers tolerate, injected into real processes under load: four
concurrent requests, prompts of 130 to 260 tokens, the tiny model, few pages. In every case each token that a client
receives equals that of a single engine; a request that does not succeed ends with `UNAVAILABLE`, and only where the
table permits it; no request takes longer than {request:.0f} s; at most {normal:.0f} s after the fault the affected
component is in use again; and afterwards all workers are idle. Otherwise the tests fail. These limits detect hangs. The
times in the table are from one run on {machine}, shared with other work, commit {commit}.

```sh
make faults    # runs all cases and writes this page; needs root
```

- **succeeded, failed**: requests that were running when the fault began, or started before recovery.
- **longest**: duration of the longest of these requests, seconds.
- **recovery**: seconds from the end of the fault (for a crash, from the crash) until every worker has taken part in a
  hand-off, or KV was loaded from the tier.
- **idle**: seconds from the end of the last request until all workers were idle.
- **held at most**: maximum number of held resources until recovery, summed over all workers; polled ten times a second,
  without frozen workers.
"""
_COLUMNS = ("fault", "expected", "succeeded", "failed", "longest", "recovery", "idle", "held at most")
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
    """Measured rows by case, with machine and commit."""

    machine: str = ""
    commit: str = ""
    rows: dict[str, Row] = {}


def read() -> Results:
    """Read the stored results; return empty results if there are none."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results) if RESULTS.exists() else Results()


def record(row: Row, machine: str, commit: str) -> None:
    """Store the row of a case; keep the rows of other cases."""
    results = read()
    known = {case.name for case in CASES}
    rows = {name: old for name, old in results.rows.items() if name in known} | {row.name: row}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(Results(machine, commit, rows))) + b"\n")


def render(results: Results) -> str:
    """Render the page.

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
    """Return (stack, fault, expected behavior) of each row of a page."""
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
