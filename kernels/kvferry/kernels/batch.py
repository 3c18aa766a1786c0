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
    """[rows] int64: page * block_tokens + place within the page, where each row's key and value are written."""

    @property
    def num_rows(self) -> int:
        """Rows over all sequences."""
        return int(self.queries.sum())
