"""How kernels are launched, as data: block sizes, warps and stages by operation, device and class of shape.

The rows are in launch.toml, each with the measurement or the reason behind it. A row for `any` device or shape stands
in where there is none of its own; the device counts for more than the shape. `trial`, `merged` and `write` are for who
measures.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.kernels.gpu.device import INTERPRETED, device_class

TABLE = Path(__file__).with_name("launch.toml")
ANY = "any"
Key = tuple[str, str, str]
"""Operation, device, class of shapes."""
_HEADER = """\
# How kernels are launched. `device` and `shape` may be "any"; `why` is a measurement (GPU, shape, number) or a reason.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of the table."""

    op: str
    device: str
    """`any`, `interpreter`, or a GPU's generation, for example `sm90`."""
    shape: str
    """`any`, or a class of shapes that the operation's wrapper names."""
    sizes: Mapping[str, int]
    """Block sizes by the kernel's own names for them."""
    warps: int
    stages: int
    why: str

    @property
    def key(self) -> Key:
        """What a row is found by."""
        return self.op, self.device, self.shape

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch a kernel; a grid without programs is no launch.

        Fused additions are asked for by name, because Triton's own default is about to change.
        """
        if 0 in grid:
            return
        with _TURN if INTERPRETED else nullcontext():
            kernel[grid](*args, **constants, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True)


_TURN = Lock()
"""The interpreter keeps the program that it runs in globals; engines of one process have threads of their own."""


def choose(op: str, device: torch.device, shape: str = ANY) -> Choice:
    """The row to launch by.

    Raises:
        InvariantBroken: the table has none.
    """
    key = op, device_class(device), shape
    if _TRIALS:
        rows, asked = _TRIALS[-1]
        asked.add(key)
        if key in rows:
            return rows[key]
    return _chosen(*key)


_TRIALS: list[tuple[dict[Key, Choice], set[Key]]] = []


@contextmanager
def trial(rows: Iterable[Choice] = ()) -> Iterator[set[Key]]:
    """While this lasts, these rows count before the table's, in every thread; plans keep what they were made by.
    A trial within another begins with that one's rows.

    Gives the keys that are asked for, each with its own device and class of shapes, never `any`.
    """
    asked: set[Key] = set()
    outer = _TRIALS[-1][0] if _TRIALS else {}
    _TRIALS.append((outer | {row.key: row for row in rows}, asked))
    try:
        yield asked
    finally:
        _TRIALS.pop()


@cache
def _chosen(op: str, device: str, shape: str) -> Choice:
    rows = table()
    for key in ((op, device, shape), (op, device, ANY), (op, ANY, shape), (op, ANY, ANY)):
        if key in rows:
            return rows[key]
    raise InvariantBroken(f"{TABLE.name} has no row for {op!r}")


@cache
def table() -> dict[Key, Choice]:
    """All rows of the shipped table, read once."""
    return {row.key: row for row in read(TABLE)}


def read(path: Path) -> list[Choice]:
    """The rows of a table.

    Raises:
        UsageError: it is not one.
    """
    try:
        rows = tomllib.loads(path.read_text("utf-8"))["choice"]
        return [Choice(**row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path.name} is no table of launch choices: {error}", field="launch") from error


def merged(rows: Iterable[Choice], measured: Iterable[Choice]) -> list[Choice]:
    """The rows, those that were measured in place of theirs, sorted."""
    together = {row.key: row for row in rows} | {row.key: row for row in measured}
    return [together[key] for key in sorted(together)]


def write(path: Path, rows: Iterable[Choice]) -> None:
    """Make a table of these rows; `read` reads the same."""
    path.write_text(_HEADER + "".join(f"\n{_section(row)}" for row in rows), "utf-8")


def _section(row: Choice) -> str:
    sizes = ", ".join(f"{name} = {value}" for name, value in row.sizes.items())
    lines = [f"{name} = {_quoted(getattr(row, name))}" for name in ("op", "device", "shape")]
    lines += [f"sizes = {{ {sizes} }}", f"warps = {row.warps}", f"stages = {row.stages}", f"why = {_quoted(row.why)}"]
    return "\n".join(("[[choice]]", *lines, ""))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
