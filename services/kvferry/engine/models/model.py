"""What the runner needs of a model, whatever computes it."""

from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.engine.batch import StepBatch
from kvferry.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Of the rows that sample, in their order."""

    values: torch.Tensor
    """[R, vocabulary] float32."""
    greedy: list[int]
    """[R]: each row's highest, the first among equals."""
    finite: list[bool]
    """[R]: whether every logit of the row is a finite number."""

    @classmethod
    def of(cls, values: torch.Tensor) -> "Logits":
        """What is to be known of these.

        Args:
            values: [R, vocabulary] float32.
        """
        if not len(values):
            return cls(values, [], [])
        low, high = torch.aminmax(values, dim=-1)  # NaN comes through as the extreme
        finite = (low.isfinite() & high.isfinite()).tolist()
        return cls(values, values.argmax(dim=-1).tolist(), finite)  # the first among equals, as torch promises


class Model(Protocol):
    """Parameters on one device, and nothing of any request."""

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the pages that it reads and writes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where pages and inputs must be."""
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

    def compute(self, batch: StepBatch, pages: torch.Tensor) -> Logits:
        """One step: keys and values of every row into `pages`, logits of the rows that sample.

        The logits stand until the next call from the same thread, which may use their memory again.

        Args:
            batch: rows, positions, which rows belong together and where their pages are.
            pages: [pages, layers, 2, K, B, D] of the model's dtype, contiguous.
        """
        ...
