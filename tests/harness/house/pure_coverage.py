"""Reports the branch coverage of the pure modules, which the contract "Decisions are pure" in imports.toml lists.

python -m harness.house.pure_coverage build/coverage.json        prints a table; status 1 below the floor
"""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTRACT = "Decisions are pure"
FLOOR_PERCENT = 95.0


@dataclass(frozen=True, slots=True)
class Covered:
    """Coverage of a module: percentage of statements and branches that tests run."""

    module: str
    percent: float
    missing: Sequence[int]
    """Line numbers of statements that no test runs; branches not taken are not included."""


def pure_modules(contracts_file: Path) -> list[str]:
    """Return the modules and packages listed in the contract.

    Raises:
        KeyError: the file has no such contract.
    """
    contracts = tomllib.loads(contracts_file.read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    found = {contract["name"]: contract for contract in contracts}
    return list(found[CONTRACT]["source_modules"])


def covered(report: Mapping[str, Mapping[str, Mapping[str, object]]], names: Sequence[str]) -> list[Covered]:
    """Return the coverage of these modules and of all modules in these packages, from coverage.py's JSON report.

    Raises:
        ValueError: a module or package is not in the report.
    """
    rows: list[Covered] = []
    for name in names:
        own = [
            _row(module, measured)
            for path, measured in sorted(report["files"].items())
            if (module := _module(path)) == name or module.startswith(f"{name}.")
        ]
        if not own:
            raise ValueError(f"the report has no entry for {name}; run with --cov for all source roots")
        rows += own
    return rows


def _row(module: str, measured: Mapping[str, object]) -> Covered:
    summary, missing = measured["summary"], measured["missing_lines"]
    if not isinstance(summary, dict) or not isinstance(missing, list):
        raise ValueError(f"the report's entry for {module} is not in coverage.py's format")
    return Covered(module, float(summary["percent_covered"]), missing)


def _module(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[1:] if parts[-1] != "__init__" else parts[1:-1])


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if a module is below the required coverage, otherwise 0."""
    rows = covered(json.loads(Path(arguments[0]).read_text("utf-8")), pure_modules(Path("imports.toml")))
    for row in rows:
        low = "" if row.percent >= FLOOR_PERCENT else f"  below {FLOOR_PERCENT:g} %"
        lines = f"  lines {', '.join(map(str, row.missing))}" if row.missing else ""
        sys.stdout.write(f"{row.module:<34} {row.percent:6.1f} %{low}{lines}\n")
    return int(any(row.percent < FLOOR_PERCENT for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
