"""Runs the experiments and writes docs/results.md and build/results.json.

python -m harness.results all rows python -m harness.results --only H4 one row; the others keep their records
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.results.page import page
from harness.results.rows import Outcome, Row
from harness.results.table import ROWS
from kvferry.bench.serving.charts import page as picture
from kvferry.core.clock import SystemClock

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "build" / "results.json"
RECORD = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True, slots=True)
class Made:
    """A row with its outcome."""

    row: Row
    outcome: Outcome
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Return the row of build/results.json."""
        row = self.row
        return {
            "id": row.source, "number": row.number, "claim": row.claim, "original": row.original,
            "ours": self.outcome.ours, "pass_line": row.pass_line, "passed": self.outcome.passed,
            "command": row.command, "why": self.outcome.why, "seconds": round(self.seconds, 1),
            "picture": f"results/H{row.number}.svg" if self.outcome.picture else "",
        }  # fmt: skip


def recorded() -> dict[int, dict[str, object]]:
    """Return the recorded rows by number."""
    if not RECORD.exists():
        return {}
    return {row["number"]: row for row in json.loads(RECORD.read_text("utf-8"))}


def chosen(names: list[str]) -> list[Row]:
    """Return the rows that are named by number, as H4, or by source; all without a name."""
    if not names:
        return list(ROWS)
    found = [row for row in ROWS if any(name in (f"H{row.number}", row.source) for name in names)]
    known = ", ".join(f"H{row.number}" for row in ROWS)
    if not found:
        raise SystemExit(f"results: no row is named {', '.join(names)}; the rows are {known}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="A row, such as H4; may be repeated.")
    arguments = parser.parse_args()
    rows, clock = recorded(), SystemClock()
    for row in chosen(arguments.only):
        begun = clock.monotonic()
        made = Made(row, row.run(), clock.monotonic() - begun)
        rows[row.number] = made.as_json()
        if made.outcome.picture:
            path = PAGE.parent / "results" / f"H{row.number}.svg"
            path.parent.mkdir(exist_ok=True)
            path.write_text(picture(f"H{row.number}: {row.claim}", made.outcome.picture), "utf-8")
        verdict = "pass" if made.outcome.passed else "MISS"
        print(f"{verdict}  H{row.number:<3} {row.source}: {made.outcome.ours} ({made.seconds:.0f} s)", file=sys.stderr)
    everything = [rows[row.number] for row in ROWS if row.number in rows]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n", "utf-8")
    # Seconds depend on the machine, so the record, which tests compare, omits them.
    kept = [{name: value for name, value in row.items() if name != "seconds"} for row in everything]
    RECORD.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(page(everything), "utf-8")


if __name__ == "__main__":
    main()
