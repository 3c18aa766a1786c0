"""What the runner needs of a model, whatever computes it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.engine.batch import StepBatch
from kvferry.engine.cache import PagedKv
from kvferry.model.config import ModelConfig


class LogitRows(Protocol):
    """[R, vocabulary] float32: an array, or something that brings a row from where it is when asked for it."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Of the rows that sample, in their order."""

    values: LogitRows
    greedy: list[int]
    """[R]: each row's highest, the first among equals."""
    finite: list[bool]
    """[R]: whether every logit of the row is a finite number."""


class Model(Protocol):
    """Parameters on one device, and nothing of any request."""

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """Of the pages that it reads and writes, a name of `core.dtypes`."""
        ...

    @property
    def device(self) -> str:
        """Where pages must be, as torch names it."""
        ...

    @property
    def kernels(self) -> str:
        """What computes: a family of torch, or the compiled kernels with their level."""
        ...

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs of products with codes are rounded to 8 bits."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all matrices, as a step reads them."""
        ...

    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        """One step: keys and values of every row into its page, logits of the rows that sample.

        The logits stand until the next call from the same thread, which may use their memory again.

        Args:
            batch: rows, positions, which rows belong together and where their pages are.
            kv: pages of the model's shape and type, where it computes.
        """
        ...
