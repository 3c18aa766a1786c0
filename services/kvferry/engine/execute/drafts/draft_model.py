"""Draft tokens from a smaller model with the same vocabulary (Leviathan et al., Fast Inference from Transformers via
Speculative Decoding, 2023; Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023).

    step    tokens that are new since the last draft ─► d1    then one row each: d1 ─► d2, d2 ─► d3, ..
    pages   of the draft model only; KV of rejected tokens is overwritten

The draft model is greedy, unless the rejection rule verifies its tokens: then each token is drawn from its distribution
with the request's parameters, and drafts have their full length for any drawn tokens (`run.rejection`). Prompts are
computed in chunks alongside the steps, and a sequence has no drafts until its prompt is computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.models.model import Logits
from kvferry.engine.execute.run.rejection import drawn
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.run.sampler import probabilities
from kvferry.engine.schedule.speculation.acceptance import DRAWN, MIN_CONFIDENCE, support_of_confidence
from kvferry.engine.schedule.speculation.draft_pages import DraftedSequence, DraftPages
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, Drawing, ModelDraft
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.step.step import DraftSource, ScheduledSequence, StepPlan

MAX_CATCH_UP_TOKENS = 512
"""Maximum prompt tokens that the draft model computes before one step, which bounds the delay of other streams."""
_MAX_LAG = 32
"""Number of tokens, in addition to one draft, that are computed together with the first draft token."""
_UNKNOWN_CONFIDENCE = 0.6
_GREEDY = SamplingParams(temperature=0.0)


class _Drafting(NamedTuple):
    request: DraftRequest
    sequence: DraftedSequence
    draft: list[int]
    supports: list[int]
    sources: list[DraftSource]


class DraftModel:
    """`ModelDrafts` of one model with its pages. Used on the engine's thread."""

    def __init__(self, runner: Runner, *, vocab_size: int, clock: Clock | None = None) -> None:
        """
        Args:
            runner: runs the draft model, with pages for its KV.
            vocab_size: vocabulary of the model that verifies; tokens beyond it are not proposed.
            clock: measures the steps.
        """
        self._runner, self._vocab_size, self._clock = runner, vocab_size, clock or SystemClock()
        self._max_tokens = runner.model.config.max_model_tokens
        self.pages = DraftPages(runner.kv.num_blocks, runner.kv.layout.block_tokens)
        self.prices = RowPrices()
        self.is_measured = False

    @property
    def is_idle(self) -> bool:
        return self.pages.is_idle

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        ready = self._catch_up(requests)
        active = [one for one in ready if self._has_room(one, depth, ready)]
        for _ in range(depth):
            if not active:
                break
            active = self._step(active, depth)
        return {
            one.request.request_id: ModelDraft(tuple(one.draft), tuple(one.supports), tuple(one.sources))
            for one in ready
            if one.draft
        }

    def forget(self, request_id: RequestId) -> None:
        self.pages.forget(request_id)

    def _catch_up(self, requests: Sequence[DraftRequest]) -> list[_Drafting]:
        """Follow the sequences, and compute chunks of their prompts; return the sequences that can be drafted now."""
        ready: list[_Drafting] = []
        budget, chunks = MAX_CATCH_UP_TOKENS, list[ScheduledSequence]()
        names = {one.request_id for one in requests}
        for one in requests:
            sequence = self.pages.sequence(one.request_id)
            sequence.follow(one.tokens)
            due = len(one.tokens) - sequence.num_computed
            if due <= one.limit + 1 + _MAX_LAG:
                ready.append(_Drafting(one, sequence, [], [], []))
                continue
            count = min(due - 1, budget)
            end = sequence.num_computed + count
            if not count or end >= self._max_tokens or not self.pages.grow(sequence, end, names):
                continue
            budget -= count
            chunks.append(self._scheduled(one, sequence, count, num_sampled=0))
        if chunks:
            self._runner.compute(self._runner.prepare(StepPlan(tuple(chunks))))
            for chunk in chunks:
                self.pages.sequence(chunk.request_id).num_computed += chunk.num_scheduled
        return ready

    def _has_room(self, one: _Drafting, depth: int, all_ready: Sequence[_Drafting]) -> bool:
        end = len(one.sequence.tokens) + min(depth, one.request.limit)
        kept = {other.request.request_id for other in all_ready}
        return end <= self._max_tokens and self.pages.grow(one.sequence, end, kept)

    def _step(self, active: Sequence[_Drafting], depth: int) -> list[_Drafting]:
        """Propose one more token for each sequence; return the sequences whose drafts continue."""
        plan = StepPlan(
            tuple(
                self._scheduled(
                    one.request, one.sequence, len(one.sequence.tokens) - one.sequence.num_computed, num_sampled=1
                )
                for one in active
            )
        )
        begun = self._clock.monotonic()
        logits = self._runner.compute(self._runner.prepare(plan)).logits
        going = [one for row, one in enumerate(active) if self._extend(one, logits, row, depth)]
        self.prices.observe(plan.num_tokens, self._clock.monotonic() - begun)
        self.is_measured = True
        return going

    def _extend(self, one: _Drafting, logits: Logits, row: int, depth: int) -> bool:
        """Add a token to a draft; return whether the draft continues."""
        sequence = one.sequence
        sequence.num_computed = len(sequence.tokens)
        if one.request.drawing is not None:
            return self._draw(one, one.request.drawing, logits, row, depth)
        token, confidence = logits.greedy[row], _confidence(logits, row)
        if not logits.finite[row] or token >= self._vocab_size or confidence < MIN_CONFIDENCE:
            return False
        sequence.tokens.append(token)
        one.draft.append(token)
        one.supports.append(support_of_confidence(confidence))
        return len(one.draft) < min(depth, one.request.limit)

    def _draw(self, one: _Drafting, drawing: Drawing, logits: Logits, row: int, depth: int) -> bool:
        """Add a token to a draft that is drawn from the draft model's distribution; return whether the draft continues,
        which does not depend on the token."""
        if not logits.finite[row]:
            return False
        values = logits.values[row][: self._vocab_size].astype(np.float64)
        values[[token for token in drawing.excluded if token < len(values)]] = -np.inf
        sampling, tokens = drawing.sampling, one.sequence.tokens
        assert sampling.seed is not None, "sampled drafts need a seed"
        token, source = drawn(probabilities(values, sampling), sampling.seed, drawing.sample_index, len(tokens))
        tokens.append(token)
        one.draft.append(token)
        one.supports.append(DRAWN)
        one.sources.append(source)
        return len(one.draft) < min(depth, one.request.limit)

    def _scheduled(
        self, request: DraftRequest, sequence: DraftedSequence, count: int, *, num_sampled: int
    ) -> ScheduledSequence:
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=sequence.tokens,
            num_prompt=len(request.tokens),
            num_computed=sequence.num_computed,
            num_scheduled=count,
            block_ids=sequence.blocks,
            num_sampled=num_sampled,
            sampling=_GREEDY,
            sample_index=0,
        )


def _confidence(logits: Logits, row: int) -> float:
    """Return the probability of the most probable token, or an assumed value if the logits are not in host memory."""
    if not isinstance(logits.values, np.ndarray):
        return _UNKNOWN_CONFIDENCE
    values = logits.values[row]
    return 1.0 / float(np.exp(values - values.max()).sum())
