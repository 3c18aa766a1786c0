"""An EAGLE head without a model, for the hidden states of `ArithmeticRunner`: it checks rows and predicts tokens."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from harness.fakes.engines import EOS, state_after
from kvferry.engine.execute.drafts.eagle_drafts import EagleDrafts
from kvferry.engine.execute.drafts.head_models import Floats, Predicted
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.speculation.trees.growing_tree import Candidate
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

    def compute(self, batch: StepBatch, hidden: Floats, kv: PagedKv, width: int) -> tuple[Predicted, Floats]:
        tokens = batch.token_ids.tolist()
        self.num_rows += len(tokens)
        for slot, row, token in zip(batch.slots.tolist(), hidden.astype(int).tolist(), tokens, strict=True):
            self._rows[slot] = (row[0], row[1], token)
        size = kv.layout.block_tokens
        for table, places in zip(batch.block_tables.tolist(), _attended(batch), strict=True):
            for path in places:
                rows = [self._rows[table[i // size] * size + i % size] for i in path]
                for before, after in itertools.pairwise(rows):
                    assert after[0] == before[0] + 1, rows
                    assert after[1] == before[2], rows
        last = [(hidden[row].astype(int).tolist(), tokens[row]) for row in batch.sample_rows.tolist()]
        states = [(row[0] + 1, token, state_after(row[2], token)) for row, token in last]
        predicted = [candidates(state, width, self._is_wrong()) for _, _, state in states]
        return predicted, np.array(states, np.float32)


def candidates(state: int, width: int, is_wrong: bool) -> list[Candidate]:
    """Return the candidates of a row: the right token at a rank that depends on the state, or only wrong ones."""
    right = state % EOS
    if width == 1:
        return [((right + is_wrong) % EOS, 0.9)]
    rank = state // EOS % width
    tokens = [right if index == rank and not is_wrong else (right + 1 + index) % EOS for index in range(width)]
    return [(token, 0.5 / (1 + index)) for index, token in enumerate(tokens)]


def _attended(batch: StepBatch) -> Iterator[list[list[int]]]:
    """Yield, for each sequence, the places to which its rows attend: all those of the last row without a tree."""
    first = 0
    for index, (count, context) in enumerate(zip(batch.queries.tolist(), batch.contexts.tolist(), strict=True)):
        size = int(batch.trees[index]) if len(batch.trees) else 0
        paths = batch.paths[first : first + count].tolist() if size else []
        root = context - size
        yield [[*range(root), *(root + i for i in range(size) if bits >> i & 1)] for bits in paths] or [
            list(range(context))
        ]
        first += count


def eagle_drafts(is_wrong: Callable[[], bool], num_blocks: int) -> EagleDrafts:
    """Create drafts of an `ArithmeticHead` with a number of pages."""
    head = ArithmeticHead(is_wrong)
    layout = KvLayout.of(head.config, block_tokens=BLOCK_TOKENS, dtype=head.dtype)
    return EagleDrafts(head, PagedKv.allocate(layout, num_blocks))
