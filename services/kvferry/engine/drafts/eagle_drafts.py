"""Draft tokens from an EAGLE head (Li et al., EAGLE, 2024, section 4.1), as chains: the most probable token of each
row.

    step    rows that the target model has computed since the last draft ─► d1     their own hidden states
            then one row each: d1 ─► d2, d2 ─► d3, ..                                 hidden states of the head
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
from kvferry.engine.drafts.head_models import EagleModel, Floats
from kvferry.engine.plan.step import ScheduledSequence, StepPlan
from kvferry.engine.speculation.acceptance import MIN_CONFIDENCE, support_of_confidence
from kvferry.engine.speculation.draft_pages import DraftedSequence, DraftPages
from kvferry.engine.speculation.head_context import MAX_LAG_ROWS, HeadContext
from kvferry.engine.speculation.model_drafts import DraftRequest, ModelDraft
from kvferry.engine.speculation.row_prices import RowPrices
from kvferry.engine.tensors.batch import build_batch
from kvferry.engine.tensors.paged_kv import PagedKv

MAX_ROWS = 512
"""Maximum rows of hidden states that the head reads before one step, which bounds the delay of other streams."""
MAX_PENDING_BYTES = 256 << 20
"""Maximum bytes of pending hidden states, over all sequences."""
_GREEDY = SamplingParams(temperature=0.0)


class _Drafting(NamedTuple):
    request: DraftRequest
    sequence: DraftedSequence
    context: HeadContext
    draft: list[int]
    supports: list[int]


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
        for _ in range(depth):
            active, hidden = self._step(active, counts, hidden, depth)
            if not active:
                break
            counts = [1] * len(active)
        return {one.request.request_id: ModelDraft(tuple(one.draft), tuple(one.supports)) for one in ready if one.draft}

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
            end = context.num_read + context.num_pending + min(depth, one.limit)
            names.add(one.request_id)
            if not 0 < context.num_pending <= budget or end > self._model.config.max_model_tokens:
                continue
            if self.pages.grow(sequence, end, names):
                budget -= context.num_pending
                ready.append(_Drafting(one, sequence, context, [], []))
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
        self, active: Sequence[_Drafting], counts: Sequence[int], hidden: Floats, depth: int
    ) -> tuple[list[_Drafting], Floats]:
        """Propose one more token for each sequence.

        Args:
            active: the sequences.
            counts: number of rows of each sequence.
            hidden: hidden states of all rows, [rows, hidden].
            depth: maximum number of draft tokens.

        Returns:
            The sequences whose drafts continue, and the hidden states of their next rows.
        """
        plan = StepPlan(tuple(_scheduled(one, count) for one, count in zip(active, counts, strict=True)))
        begun = self._clock.monotonic()
        batch = build_batch(plan, block_tokens=self._kv.layout.block_tokens)
        found, after = self._model.compute(batch, hidden, self._kv)
        going: list[int] = []
        for row, one in enumerate(active):
            if not one.draft:
                one.sequence.num_computed += counts[row]
            if _extend(one, found.tokens[row], found.confidences[row], depth):
                going.append(row)
        self.prices.observe(plan.num_tokens, self._clock.monotonic() - begun)
        self.is_measured = True
        return [active[row] for row in going], after[going]


def _extend(one: _Drafting, token: int, confidence: float, depth: int) -> bool:
    """Add a token to a draft; return whether the draft continues."""
    if token < 0 or confidence < MIN_CONFIDENCE:
        return False
    one.sequence.tokens.append(token)
    one.draft.append(token)
    one.supports.append(support_of_confidence(confidence))
    return len(one.draft) < min(depth, one.request.limit)


def _scheduled(one: _Drafting, count: int) -> ScheduledSequence:
    """Schedule the last `count` rows of a sequence."""
    tokens = one.sequence.tokens
    return ScheduledSequence(
        request_id=one.request.request_id,
        token_ids=tokens,
        num_prompt=len(tokens),
        num_computed=len(tokens) - count,
        num_scheduled=count,
        block_ids=one.sequence.blocks,
        num_sampled=1,
        sampling=_GREEDY,
        sample_index=0,
    )
