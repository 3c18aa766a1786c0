"""Representations of a quantized matrix in memory: candidates, smallest first, and the reasons against rejected ones.

A kept type is the number of a row format that kernels/cpu/weights/pack.hpp reads. Some are GGUF types; numbers from
1000 stand for checkpoint formats without an exact GGUF type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.weights.quantized.grouped import GroupedCodes
from kvferry.weights.tensors import Shape, Stored

BLOCK = 32
"""Number of inputs that share a scale in kept quantized values."""


class Kept(Enum):
    """Type in which a matrix is kept: (type number, description)."""

    CODES4 = (2, "4-bit values with a float16 scale per 32 inputs")
    E2M1 = (1004, "4-bit e2m1 values with a float16 scale per 32 inputs")
    E2M1_WIDE = (1005, "4-bit e2m1 values with a float32 scale per 32 inputs")
    CODES4_WIDE = (1000, "4-bit values with a float32 scale and minimum per 32 inputs")
    CODES8 = (8, "8-bit values with a float16 scale per 32 inputs")
    CODES8_WIDE = (1001, "8-bit values with a float32 scale per 32 inputs")
    FLOAT16 = (1002, "float16")
    BFLOAT16 = (1003, "bfloat16")

    @property
    def type_id(self) -> int:
        """Number of the row format."""
        return self.value[0]

    @property
    def title(self) -> str:
        """Readable description."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class MatrixChoice:
    """Type in which a matrix is kept."""

    kept: Kept
    scheme: str
    """Readable name of the scheme of the checkpoint."""
    passed_over: tuple[tuple[Kept, str], ...] = ()
    """Smaller candidates, each with the reason for its rejection."""

    @property
    def line(self) -> str:
        """Description in one line."""
        by_reason: dict[str, list[str]] = {}
        for kept, reason in self.passed_over:
            by_reason.setdefault(reason, []).append(kept.title)
        others = "".join(f"; not {' or '.join(titles)}: {reason}" for reason, titles in by_reason.items())
        return f"{self.scheme}, kept as {self.kept.title}{others}"


class QuantizedMatrix(Protocol):
    """A matrix [outputs, inputs] of a quantized checkpoint. Immutable; its data stay in the mapped file."""

    @property
    def shape(self) -> Shape:
        """(outputs, inputs)."""
        ...

    @property
    def choice(self) -> MatrixChoice:
        """Representation of the matrix; reads scales, but no quantized values."""
        ...

    def values(self) -> npt.NDArray[np.float32]:
        """Dequantize to a new float32 array [outputs, inputs]."""
        ...

    def stored(self) -> Stored:
        """Return the rows as they are kept, in order; they are converted when `Stored.data` is read."""
        ...

    def grouped(self) -> GroupedCodes | None:
        """Return the codes and scales; `None` if groups have no common form."""
        ...

    def rows(self, first: int, count: int) -> "QuantizedMatrix":
        """Return a range of rows.

        Args:
            first: index of the first row (output).
            count: number of rows.
        """
        ...


def report(choices: Mapping[str, MatrixChoice]) -> list[str]:
    """Return a line for each distinct choice, with its number of matrices and the name of the first one."""
    names: dict[str, list[str]] = {}
    for name, choice in choices.items():
        names.setdefault(choice.line, []).append(name)
    return [f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {line}" for line, of in names.items()]
