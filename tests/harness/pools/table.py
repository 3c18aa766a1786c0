"""Generates the table in docs/operations.md: the effect of events in a pool on its clients."""

import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from harness.pools.load import CLOCK, Ended, Outcome
from kvferry.bench.commit import ROOT

PAGE = ROOT / "docs" / "operations.md"
RESULTS = ROOT / "build" / "zero-loss.json"
EVENTS = (
    "scale out decode",
    "scale in decode",
    "rolling update of both roles",
    "rollback",
    "an edit superseded by another",
    "the leading operator killed in a rollout",
    "a gateway pod deleted",
    "a gateway killed",
    "worker pods deleted",
    "workers killed",
    "a worker pod evicted",
)
MAY_CUT = "a gateway killed"
"""Event that may interrupt streams, since their progress is stored only in the gateway."""

_BLOCK = re.compile(r"(<!-- measured: zero-loss -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = ("event", "requests", "right", "wrong", "lost", "cut", "tried again", "slowest, s", "event took, s")


class Row(msgspec.Struct, frozen=True):
    """Measured effect of an event on clients."""

    event: str
    requests: int
    right: int
    wrong: int
    lost: int
    cut: int
    retried: int
    slowest_seconds: float
    event_seconds: float


class Results(msgspec.Struct):
    """Results of the last run of each event."""

    machine: str = ""
    day: str = ""
    rows: dict[str, Row] = {}


def row(event: str, ended: Iterable[Ended], event_seconds: float) -> Row:
    """Count the outcomes of requests during an event."""
    all_of_them = list(ended)
    counts = Counter(end.outcome for end in all_of_them)
    return Row(
        event,
        len(all_of_them),
        counts[Outcome.RIGHT],
        counts[Outcome.WRONG],
        counts[Outcome.LOST],
        counts[Outcome.CUT],
        sum(end.retries > 0 for end in all_of_them),
        round(max((end.seconds for end in all_of_them), default=0.0), 1),
        round(event_seconds, 1),
    )


def described(row: Row) -> str:
    """Format a row as one line of text for the terminal."""
    return ", ".join(f"{name} {cell}" for name, cell in list(zip(_COLUMNS, _cells(row), strict=True))[1:])


def record(row: Row, machine: str) -> None:
    """Store the row of an event; keep the rows of other events."""
    results = read()
    rows = {name: old for name, old in results.rows.items() if name in EVENTS} | {row.event: row}
    day = datetime.fromtimestamp(CLOCK.wall(), UTC).date().isoformat()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(Results(machine, day, rows))) + b"\n")


def read() -> Results:
    """Read the stored results; return empty results if there are none."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results) if RESULTS.exists() else Results()


def render(results: Results) -> str:
    """Render the generated block of the page.

    Raises:
        KeyError: an event was not measured.
    """
    lines = [f"Measured {results.day} on {results.machine}.\n\n", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "".join([*lines, *(_line(_cells(results.rows[event])) for event in EVENTS)])


def renewed(page: str, results: Results) -> str:
    """Return the page with its generated block updated."""
    return _BLOCK.sub(lambda m: m[1] + render(results) + m[2], page)


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of the generated block of a page, by row."""
    found = _BLOCK.search(page)
    lines = [line for line in (found[0] if found else "").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _cells(row: Row) -> list[str]:
    return [str(getattr(row, name)) for name in row.__struct_fields__]


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return f"| {' | '.join(cells)} |\n"
