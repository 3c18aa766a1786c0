"""What attention needs to know about one step's ragged batch.

All sequences' rows stand one after the other, without padding:

    rows       [ a0 a1 a2 | b0 | c0 c1 ]        T of them
    queries        3        1      2            rows of each sequence
    contexts       3        9      7            tokens each sequence has in pages after this step's writes
    row r of a sequence stands at position  context - queries + r  and sees positions 0 .. itself
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """One step's sequences. Host arrays for planning; `slots` on the model's device."""

    queries: npt.NDArray[np.int64]
    """[sequences], each at least 1."""
    contexts: npt.NDArray[np.int64]
    """[sequences], each at least its `queries`."""
    block_tables: npt.NDArray[np.int64]
    """[sequences, most blocks of any]: page of each block; rows that need fewer are filled with 0."""
    slots: torch.Tensor
    """[rows] int64: page * block_tokens + place within the page, where each row's key and value are written. Families
    with `DeviceOps` take -1 as well: written nowhere, for a row that is padding."""

    @property
    def num_rows(self) -> int:
        """Rows over all sequences."""
        return int(self.queries.sum())


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """What queries and keys are normed with before they are rotated (Qwen 3)."""

    query: torch.Tensor
    """[head dim]."""
    key: torch.Tensor
    """[head dim]."""
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRules:
    """What a layer's attention is, beyond causal."""

    scale: float
    """Scores are multiplied by it."""
    window: int | None = None
    """A row sees so many positions, its own included; `None`: all before it."""
    soft_cap: float | None = None
    """Scores s become cap * tanh(s / cap), after the scale."""
    sinks: torch.Tensor | None = None
    """[H] float32: a score that each head's weights are shared with and that brings no value (Xiao et al., Efficient
    Streaming Language Models with Attention Sinks, 2024, in the learned form)."""


@dataclass(frozen=True, slots=True, eq=False)
class SingleRows:
    """Sequences of one row each, described on the device alone, so that the same launches serve a batch of any lengths.

    A row may be padding: its context is 0, it sees nothing and its result is zeros.
    """

    tables: torch.Tensor
    """[places, blocks] int32: page of each block; what a context does not reach may be anything."""
    places: torch.Tensor
    """[rows] int64: which table is each row's."""
    contexts: torch.Tensor
    """[rows] int64, none above `most_tokens`."""
    most_tokens: int
    """How long a context may be; bounds the room for parts of results."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences that begin with the same pages."""

    members: tuple[int, ...]
    """Rows of the batch's tables, each computing one token or a few."""
    tokens: int
    """How many of their first tokens are the same; all of these were computed in earlier steps."""
