"""Launch configurations: block sizes, warps and stages, by operation, device and shape class.

The rows are in launch.toml, each with a measurement or a reason. A row for `any` device or shape is the default if no
specific row matches; a device match takes precedence over a shape match. `trial`, `merged` and `write` are for tuning.
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
"""Key of a row in the table: operation, device, class of shapes."""
_HEADER = """\
# How kernels are launched. `device` and `shape` may be "any"; `why` is a measurement (GPU, shape, number) or a reason.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """Launch configuration of an operation, which is one row of the table."""

    op: str
    device: str
    """`any`, `interpreter`, or a GPU generation such as `sm90`."""
    shape: str
    """`any`, or a class of shapes defined by the operation's wrapper."""
    sizes: Mapping[str, int]
    """Block sizes, by the names of the kernel's parameters."""
    warps: int
    stages: int
    why: str

    @property
    def key(self) -> Key:
        """Key of the row: operation, device, class of shapes."""
        return self.op, self.device, self.shape

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch a kernel, unless the grid is empty.

        FMA fusion is set explicitly, since Triton's default will change.
        """
        if 0 in grid:
            return
        with _TURN if INTERPRETED else nullcontext():
            kernel[grid](*args, **constants, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True)


_TURN = Lock()
"""Lock that serializes Triton's interpreter, since it has global state and the engines of a process run on separate
threads."""


def choose(op: str, device: torch.device, shape: str = ANY) -> Choice:
    """Select the launch configuration of an operation.

    Raises:
        InvariantBroken: the table has no matching row.
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
    """Override rows of the table within the `with` block, in every thread; existing plans keep their rows. Nested
    trials inherit the rows of the outer trial. The context manager yields the set of keys that operations requested,
    each with a specific device and shape class, never `any`.
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
    """Return all rows of the shipped table, which is read once."""
    return {row.key: row for row in read(TABLE)}


def read(path: Path) -> list[Choice]:
    """Read the rows of a table.

    Raises:
        UsageError: the file is malformed.
    """
    try:
        rows = tomllib.loads(path.read_text("utf-8"))["choice"]
        return [Choice(**row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path.name} is not a table of launch configurations: {error}", field="launch") from error


def merged(rows: Iterable[Choice], measured: Iterable[Choice]) -> list[Choice]:
    """Replace rows with measured rows of equal keys; return all rows, sorted."""
    together = {row.key: row for row in rows} | {row.key: row for row in measured}
    return [together[key] for key in sorted(together)]


def write(path: Path, rows: Iterable[Choice]) -> None:
    """Write rows to a table file; this is the inverse of `read`."""
    path.write_text(_HEADER + "".join(f"\n{_section(row)}" for row in rows), "utf-8")


def _section(row: Choice) -> str:
    sizes = ", ".join(f"{name} = {value}" for name, value in row.sizes.items())
    lines = [f"{name} = {_quoted(getattr(row, name))}" for name in ("op", "device", "shape")]
    lines += [f"sizes = {{ {sizes} }}", f"warps = {row.warps}", f"stages = {row.stages}", f"why = {_quoted(row.why)}"]
    return "\n".join(("[[choice]]", *lines, ""))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
