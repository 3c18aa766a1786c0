"""An EAGLE head without a model, for the hidden states of `ArithmeticRunner`: it checks rows and predicts tokens."""

import itertools
from collections.abc import Callable

import numpy as np

from harness.fakes.engines import EOS, state_after
from kvferry.engine.drafts.eagle_drafts import EagleDrafts
from kvferry.engine.drafts.head_models import Floats, Predicted
from kvferry.engine.tensors.batch import StepBatch
from kvferry.engine.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

BLOCK_TOKENS = 4


class ArithmeticHead:
    """A head whose rows have hidden states [position, token, checksum], and which stores them in its KV slots.

    Rows of a context must be those of consecutive tokens of one sequence: a hidden state of a rejected token, a missing
    row, or a page of another sequence fails.
    """

    def __init__(self, is_wrong: Callable[[], bool]) -> None:
        self.config = tiny.config()
        self.dtype = "float32"
        self._is_wrong = is_wrong
        self._rows: dict[int, tuple[int, int, int]] = {}
        """Position, its token and the next token, by slot."""
        self.num_rows = 0

    def fuse(self, hidden: Floats) -> Floats:
        return hidden

    def compute(self, batch: StepBatch, hidden: Floats, kv: PagedKv) -> tuple[Predicted, Floats]:
        tokens = batch.token_ids.tolist()
        self.num_rows += len(tokens)
        for slot, row, token in zip(batch.slots.tolist(), hidden.astype(int).tolist(), tokens, strict=True):
            self._rows[slot] = (row[0], row[1], token)
        for table, context in zip(batch.block_tables.tolist(), batch.contexts.tolist(), strict=True):
            size = kv.layout.block_tokens
            rows = [self._rows[table[i // size] * size + i % size] for i in range(context)]
            for before, after in itertools.pairwise(rows):
                assert after[0] == before[0] + 1, rows
                assert after[1] == before[2], rows
        last = [(hidden[row].astype(int).tolist(), tokens[row]) for row in batch.sample_rows.tolist()]
        states = [(row[0] + 1, token, state_after(row[2], token)) for row, token in last]
        predicted = [(state % EOS + 1) % EOS if self._is_wrong() else state % EOS for _, _, state in states]
        return Predicted(predicted, [0.9] * len(predicted)), np.array(states, np.float32)


def eagle_drafts(is_wrong: Callable[[], bool], num_blocks: int) -> EagleDrafts:
    """Create drafts of an `ArithmeticHead` with a number of pages."""
    head = ArithmeticHead(is_wrong)
    layout = KvLayout.of(head.config, block_tokens=BLOCK_TOKENS, dtype=head.dtype)
    return EagleDrafts(head, PagedKv.allocate(layout, num_blocks))
