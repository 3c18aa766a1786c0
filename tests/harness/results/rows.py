"""Rows of the table of results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.serving.charts import Panel


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one experiment."""

    ours: str
    passed: bool
    why: str = ""
    """Reason for a missed target, or a limitation of the numbers."""
    picture: Sequence[Panel] = ()
    """Curves for the picture in docs/results."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published claim, and the experiment that reproduces it."""

    number: int
    """Row `n` runs alone with `--only Hn`."""
    source: str
    """Paper and figure or section; the row's id in the JSON file."""
    claim: str
    original: str
    pass_line: str
    run: Callable[[], Outcome]
    is_fast: bool = False
    """Whether the tests run this row again, which must take seconds at most."""

    @property
    def command(self) -> str:
        """Command that runs this row alone."""
        return f'make results ARGS="--only H{self.number}"'
