"""Draft tokens from an EAGLE head (Li et al., EAGLE, 2024, section 4.1): the most probable token of each row, as a
chain, or the most probable tokens, as a tree (Li et al., EAGLE-2, 2024, section 4).

    step    rows that the target model has computed since the last draft ─► d1     their own hidden states
            then one row each: d1 ─► d2, d2 ─► d3, ..                                 hidden states of the head
    tree    then the best rows of each level, at most the width; each attends to its path
    pages   of the head only; rows of draft tokens are overwritten by those of the accepted tokens

A row's hidden state comes from the verifying step, so that nothing is computed twice; if it is unknown, the head's
context begins later (`speculation.head_context`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.drafts.candidates import model_draft, worth_verifying
from kvferry.engine.execute.drafts.head_models import EagleModel, Floats
from kvferry.engine.execute.tensors.batch import build_batch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.speculation.draft_pages import DraftedSequence, DraftPages
from kvferry.engine.schedule.speculation.head_context import MAX_LAG_ROWS, HeadContext
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, ModelDraft
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.speculation.trees.growing_tree import GrowingTree
from kvferry.engine.schedule.step.draft_tree import is_chain
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan

MAX_ROWS = 512
"""Maximum rows of hidden states that the head reads before one step, which bounds the delay of other streams."""
MAX_PENDING_BYTES = 256 << 20
"""Maximum bytes of pending hidden states, over all sequences."""
MAX_TREE_ROWS = 62
"""Maximum rows that the head computes for a tree after its root: a row's path is a mask in a signed 64-bit integer."""
_GREEDY = SamplingParams(temperature=0.0)


class _Drafting(NamedTuple):
    request: DraftRequest
    sequence: DraftedSequence
    context: HeadContext
    tree: GrowingTree
    parents: list[int]
    """Row of the parent of each computed draft token, as rows of the head; its root is the last token of the context.
    """
    rows: dict[int, int]
    """Row of the head by row of `tree`, for the root and the computed draft tokens."""


class EagleDrafts:
    """`ModelDrafts` of one head with its pages. Used on the engine's thread."""

    def __init__(self, model: EagleModel, kv: PagedKv, *, clock: Clock | None = None) -> None:
        """
        Args:
            model: the head.
            kv: pages for its KV.
            clock: measures the steps.
        """
        self._model, self._kv, self._clock = model, kv, clock or SystemClock()
        self._contexts: dict[RequestId, HeadContext] = {}
        self._num_pending = 0
        self.pages = DraftPages(kv.num_blocks, kv.layout.block_tokens)
        self.prices = RowPrices()
        self.is_measured = False

    @property
    def is_idle(self) -> bool:
        return self.pages.is_idle and not self._contexts and not self._num_pending

    def read(self, request_id: RequestId, position: int, hidden: Floats) -> None:
        """See `HiddenReader.read`."""
        context = self._contexts.setdefault(request_id, HeadContext())
        self._num_pending -= context.num_pending
        context.add(position, hidden)
        self._num_pending += context.num_pending
        if self._num_pending * hidden.shape[1] * hidden.itemsize > MAX_PENDING_BYTES:
            self._shorten()

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        active = ready = self._ready(requests, depth)
        if not ready:
            return {}
        own = [one.context.take() for one in ready]
        self._num_pending -= sum(map(len, own))
        counts = [len(rows) for rows in own]
        hidden = self._model.fuse(np.concatenate(own) if len(own) > 1 else own[0])
        levels: list[list[int]] = [[0]] * len(active)
        for level in range(1, depth + 1):
            after = self._step(active, counts, levels, hidden, level)
            if level == depth:
                break
            active, levels, hidden = _next_rows(active, levels, after, level, depth)
            if not active:
                break
            counts = [len(rows) for rows in levels]
        return {one.request.request_id: model_draft(one.tree.draft()) for one in ready if one.tree.nodes}

    def forget(self, request_id: RequestId) -> None:
        self.pages.forget(request_id)
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._num_pending -= context.num_pending

    def _ready(self, requests: Sequence[DraftRequest], depth: int) -> list[_Drafting]:
        """Return the sequences that can be drafted now, limited by the budget of rows and by free pages."""
        ready: list[_Drafting] = []
        budget = MAX_ROWS
        names: set[RequestId] = set()
        for one in requests:
            context = self._contexts.get(one.request_id)
            if context is None or context.end != len(one.tokens) - 1:
                continue
            sequence = self._followed(one, context)
            # The last level is not computed, and the root has a row of the context.
            end = context.num_read + context.num_pending + one.width * min(depth, one.limit)
            names.add(one.request_id)
            if not 0 < context.num_pending <= budget or end > self._model.config.max_model_tokens:
                continue
            if self.pages.grow(sequence, end, names):
                budget -= context.num_pending
                ready.append(_Drafting(one, sequence, context, GrowingTree(), [], {0: 0}))
        return ready

    def _followed(self, one: DraftRequest, context: HeadContext) -> DraftedSequence:
        """Return the head's state for a sequence, with its current tokens."""
        sequence = self.pages.sequence(one.request_id)
        before = context.num_pending
        context.keep(context.limit)
        self._num_pending += context.num_pending - before
        if not sequence.num_computed or context.num_read != sequence.num_computed:
            # True if the context is new, if rows of it were dropped, or if its pages were released.
            context.restart()
            sequence.restart()
        sequence.extend(one.tokens, context.start + 1)
        return sequence

    def _shorten(self) -> None:
        for context in self._contexts.values():
            self._num_pending -= context.num_pending
            context.keep(MAX_LAG_ROWS)
            self._num_pending += context.num_pending

    def _step(
        self,
        active: Sequence[_Drafting],
        counts: Sequence[int],
        levels: Sequence[Sequence[int]],
        hidden: Floats,
        level: int,
    ) -> Floats:
        """Compute rows, and add their candidates to the trees.

        Args:
            active: the sequences.
            counts: number of rows of each sequence.
            levels: rows of each tree whose candidates are predicted.
            hidden: hidden states of all rows, [rows, hidden].
            level: number of the level that the candidates form, from 1.

        Returns:
            The hidden states of the rows after the predicted ones.
        """
        plan = StepPlan(
            tuple(_scheduled(one, count, len(rows)) for one, count, rows in zip(active, counts, levels, strict=True))
        )
        begun = self._clock.monotonic()
        batch = build_batch(plan, block_tokens=self._kv.layout.block_tokens)
        found, after = self._model.compute(batch, hidden, self._kv, max(one.request.width for one in active))
        predicted = iter(found)
        for one, count, rows in zip(active, counts, levels, strict=True):
            if level == 1:
                one.sequence.num_computed += count
            one.tree.add_level([(row, worth_verifying(next(predicted), one.request.width)) for row in rows])
        # In a tree, a level has a number of rows that depends on the tokens.
        has_chains = all(one.request.width == 1 for one in active)
        self.prices.observe(plan.num_tokens if has_chains else len(active), self._clock.monotonic() - begun)
        self.is_measured = True
        return after


def _next_rows(
    active: Sequence[_Drafting], levels: Sequence[Sequence[int]], after: Floats, level: int, depth: int
) -> tuple[list[_Drafting], list[list[int]], Floats]:
    """Append the best tokens of the last level to the tokens of the sequences whose drafts continue.

    Args:
        active: the sequences.
        levels: rows of each tree whose candidates were predicted.
        after: hidden states after these rows, [rows, hidden].
        level: number of the last level.
        depth: number of levels of the draft.

    Returns:
        The sequences, the rows of their trees that are computed next, and the hidden states of these rows.
    """
    going, computed, indices, first = list[_Drafting](), list[list[int]](), list[int](), 0
    for one, rows in zip(active, levels, strict=True):
        # One row is left for each later level but the last one, whose rows are not computed.
        room = MAX_TREE_ROWS - len(one.parents) - (min(depth, one.request.limit) - level - 1)
        best = one.tree.frontier(min(one.request.width, room)) if level < one.request.limit else []
        for row in best:
            node = one.tree.nodes[row - 1]
            one.sequence.tokens.append(node.token)
            one.parents.append(one.rows[node.parent])
            one.rows[row] = len(one.parents)
            indices.append(first + rows.index(node.parent))
        if best:
            going.append(one)
            computed.append(best)
        first += len(rows)
    return going, computed, after[indices]


def _scheduled(one: _Drafting, count: int, sampled: int) -> ScheduledSequence:
    """Schedule the last `count` rows of a sequence, of which the last `sampled` are predicted."""
    tokens = one.sequence.tokens
    return ScheduledSequence(
        request_id=one.request.request_id,
        token_ids=tokens,
        num_prompt=len(tokens),
        num_computed=len(tokens) - count,
        num_scheduled=count,
        block_ids=one.sequence.blocks,
        num_sampled=sampled,
        sampling=_GREEDY,
        sample_index=0,
        parents=() if is_chain(one.parents) else tuple(one.parents),
    )
