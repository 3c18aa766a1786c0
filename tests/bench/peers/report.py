"""Rows of the report: medians and ranges, shares of the bounds, and ratios within each round; as CSV and Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvferry.bench.rows import append_csv as append_rows

OURS = "kvferry"
FAST = "-fast"
"""Suffix of the names of kvferry's engines with fast numerics."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of values."""

    median: float
    least: float
    most: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the median, minimum and maximum of one or more values."""
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Measured:
    """One row's value of one engine in one round."""

    round: int
    row: str
    engine: str
    weight_class: str
    value: float
    share: float | None = None
    """Share of the bound, which was measured just before; `None` if the row has no bound."""
    unit: str = "tokens/s"


@dataclass(frozen=True, slots=True)
class Row:
    """One engine in one row of the comparison, over all rounds."""

    row: str
    engine: str
    weight_class: str
    unit: str
    median: float
    least: float
    most: float
    n: int
    share_of_bound: float | None
    ours_against_it: float | None
    """Median over the rounds of kvferry's value divided by this engine's, with weights of the same class; `None` for
    kvferry.
    """
    fast_against_it: float | None = None
    """The same ratio for kvferry with fast numerics, if it was run."""


def with_ratios(measured: Iterable[Measured], numerator: str, denominator: str, name: str) -> list[Measured]:
    """Return all measurements and, for engines with both rows in a round, the ratio of the first to the second."""
    found = list(measured)
    below = {(m.round, m.engine): m.value for m in found if m.row == denominator}
    ratios = [
        Measured(m.round, name, m.engine, m.weight_class, m.value / below[m.round, m.engine], unit="times")
        for m in found
        if m.row == numerator and (m.round, m.engine) in below
    ]
    return found + ratios


def rows(measured: Sequence[Measured], engines: Sequence[str]) -> list[Row]:
    """Return the rows in the order of their first measurement, with the engines in the order of `engines`.

    Args:
        measured: all values.
        engines: all their engines.
    """
    groups: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.row, each.engine), []).append(each)
    ours = _by_cell(m for m in measured if _is_ours(m.engine) and not m.engine.endswith(FAST))
    fast = _by_cell(m for m in measured if _is_ours(m.engine) and m.engine.endswith(FAST))
    order = list(dict.fromkeys(m.row for m in measured))
    found = []
    for (row, engine), values in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), engines.index(item[0][1]))
    ):
        spread = Spread.of([m.value for m in values])
        shares = [m.share for m in values if m.share is not None]
        found.append(
            Row(
                row=row,
                engine=engine,
                weight_class=values[0].weight_class,
                unit=values[0].unit,
                median=spread.median,
                least=spread.least,
                most=spread.most,
                n=spread.n,
                share_of_bound=statistics.median(shares) if shares else None,
                ours_against_it=_ratio(ours, values),
                fast_against_it=_ratio(fast, values),
            )
        )
    return found


_Cells = dict[tuple[int, str, str], float]
"""Values by round, row and class of weights."""


def _by_cell(measured: Iterable[Measured]) -> _Cells:
    return {(m.round, m.row, m.weight_class): m.value for m in measured}


def _ratio(ours: _Cells, theirs: Sequence[Measured]) -> float | None:
    """Return the median ratio over the rounds with both values; `None` if there is no such round, or both engines are
    kvferry.
    """
    cells = [(ours.get((m.round, m.row, m.weight_class)), m) for m in theirs if not _is_ours(m.engine)]
    ratios = [value / m.value for value, m in cells if value is not None]
    return statistics.median(ratios) if ratios else None


def markdown(found: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = [
        "| | engine | weights | median (least to most) | of the bound | kvferry against it | fast |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        share = "" if row.share_of_bound is None else f"{100 * row.share_of_bound:.0f} %"
        against, fast = ("" if r is None else f"{r:.2f}" for r in (row.ours_against_it, row.fast_against_it))
        value = f"{_short(row.median)} ({_short(row.least)} to {_short(row.most)}) {row.unit}"
        lines.append(f"| {row.row} | {row.engine} | {row.weight_class} | {value} | {share} | {against} | {fast} |")
    return "\n".join(lines)


def append_csv(path: Path, found: Sequence[Row], about: Mapping[str, object]) -> None:
    """Append rows to a CSV file, each with the metadata of the run; write the header if the file is new.

    Raises:
        ValueError: the file has other columns.
    """
    append_rows(path, [{**about, **{k: _plain(v) for k, v in asdict(row).items()}} for row in found])


def _is_ours(engine: str) -> bool:
    return engine.startswith(OURS)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _plain(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
