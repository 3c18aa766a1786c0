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
    """Why the line was missed, or what the numbers do not show."""
    picture: Sequence[Panel] = ()
    """Curves, which are drawn to docs/results."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published claim, and the experiment that makes it again."""

    number: int
    """Row `n` runs alone with `--only Hn`."""
    source: str
    """Paper and figure or section; the row's id in the JSON file."""
    claim: str
    original: str
    pass_line: str
    run: Callable[[], Outcome]
    is_fast: bool = False
    """Whether the tests run it again; seconds at most."""

    @property
    def command(self) -> str:
        """The command that makes this row alone."""
        return f'make results ARGS="--only H{self.number}"'
