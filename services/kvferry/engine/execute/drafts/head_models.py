"""Interface between heads and their kernels; the kernels are the target model's."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.speculation.trees.growing_tree import Candidate
from kvferry.weights.config import ModelConfig

_MAY_OVERFLOW = np.errstate(over="ignore", invalid="ignore")
"""Weights that are finite can have results that are not; these propose no token, so they need no warning."""
Floats = npt.NDArray[np.float32]
Predicted = list[list[Candidate]]
"""[S]: most probable tokens of the target model after each of S rows, with the probability of each, in descending
order; empty for a row whose logits are not finite."""


class EagleModel(Protocol):
    """An EAGLE head with the target model's embedding and, if it has no output head of its own, output head."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the head's layer."""
        ...

    @property
    def dtype(self) -> str:
        """Data type of its KV."""
        ...

    def fuse(self, hidden: Floats) -> Floats:
        """Convert hidden states of the target model to the inputs [N, hidden] of the head's rows."""
        ...

    def compute(self, batch: StepBatch, hidden: Floats, kv: PagedKv, width: int) -> tuple[Predicted, Floats]:
        """Run the head on rows, and write their keys and values.

        Args:
            batch: the rows, with the target model's token ids.
            hidden: [T, hidden]: result of `fuse`, or hidden states that the head returned.
            kv: pages of the head.
            width: number of predicted tokens of each row.

        Returns:
            For the rows of `batch.sample_rows`, the predicted tokens and the hidden states [S, hidden] of the next
            rows.
        """
        ...


class MedusaModel(Protocol):
    """Medusa heads."""

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        ...

    def predict(self, head: int, hidden: Floats, width: int) -> Predicted:
        """Predict the tokens of a head from hidden states [S, hidden] after the final norm.

        Args:
            head: index of the head, from 0.
            hidden: hidden states after the final norm, [S, hidden] float32.
            width: number of predicted tokens of each row.
        """
        ...


@_MAY_OVERFLOW
def predicted(logits: Floats, ids: npt.NDArray[np.int64] | None, width: int) -> Predicted:
    """Return the most probable tokens.

    Args:
        logits: [S, vocabulary of the head]; overwritten if `width` is above 1.
        ids: token of the target model by token of the head; `None` if they are the same.
        width: number of tokens of each row.
    """
    best = logits.argmax(axis=1) if len(logits) else np.empty(0, np.int64)
    found: Predicted = []
    for row, token in zip(logits, best.tolist(), strict=True):
        peak = float(row[token])
        total = float(np.exp(row - row[token]).sum())
        candidates: list[Candidate] = []
        while np.isfinite(total) and len(candidates) < width:
            share = min(1.0, float(np.exp(row[token] - peak)) / total)
            candidates.append((token if ids is None else int(ids[token]), share))
            if len(candidates) < width:
                row[token] = -np.inf
                token = int(row.argmax())
        found.append(candidates)
    return found


@_MAY_OVERFLOW
def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Normalize the rows of x, [N, hidden].

    Args:
        x: rows, [N, hidden] float32.
        weight: weight of the norm, [hidden] float32.
        epsilon: number added to the mean square.
    """
    scale = 1.0 / np.sqrt(np.einsum("ij,ij->i", x, x) / x.shape[1] + epsilon)
    result: Floats = x * scale[:, None].astype(np.float32) * weight
    return result
