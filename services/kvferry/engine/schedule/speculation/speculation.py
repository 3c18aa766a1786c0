"""Speculation of one engine: the draft tokens of each step, by sequence.

tokens  ──► proposer, or draft model ──► draft ──► length by gain and price ──► scheduled after the last token
tokens  ◄── sampled rows, up to the first that differs from the draft ──► acceptance, prices
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.speculation.acceptance import FORCED, Acceptance, support_of_match
from kvferry.engine.schedule.speculation.draft_depth import DraftDepth
from kvferry.engine.schedule.speculation.draft_lengths import Lengths, PayingDrafts, WholeDrafts
from kvferry.engine.schedule.speculation.matches import TokenArray
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, Drawing, HiddenReader, ModelDrafts
from kvferry.engine.schedule.speculation.proposer_choice import ExpectedDraft
from kvferry.engine.schedule.speculation.proposers import NO_DRAFT, Draft, NgramProposer, Proposer, SuffixProposer
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.speculation.sequence_drafts import SequenceDrafts, SupportedDraft
from kvferry.engine.schedule.speculation.settings import (
    AUTO,
    MAX_DRAFT_TOKENS,
    MODEL_METHODS,
    NGRAM,
    OFF,
    SpeculationSettings,
)
from kvferry.engine.schedule.speculation.trees.chains_only import chain_reason
from kvferry.engine.schedule.speculation.trees.growing_tree import MAX_NODES
from kvferry.engine.schedule.step.draft_tree import is_chain
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import DraftSources, ScheduledSequence, StepPlan, StepResult

_TEXT, _MODEL = 0, 1
"""Numbers of the proposers: the sequence's text, and the draft model or heads."""
_LONG_MATCH = 6
"""With a draft model that drafts a fixed number of tokens: minimum length of a match in the sequence's own text that is
used instead. Otherwise `ProposerChoice` decides."""
Drafts = Mapping[RequestId, tuple[int, ...]]
"""Draft tokens of a step, by sequence; sequences without any are absent."""


@dataclass(slots=True)
class SpeculationCounts:
    """Counters of verified drafts."""

    num_drafts: int = 0
    """Drafts that were verified at least in part."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    """Number of drafts whose token at each position was accepted."""


class Speculation:
    """Drafts of one engine's sequences. Used on the engine's thread."""

    def __init__(
        self,
        proposer: Proposer,
        lengths: Lengths,
        *,
        num_drafts: int,
        draft_model: ModelDrafts | None = None,
        depth: DraftDepth | None = None,
        is_rejecting: bool = False,
        width: int = 1,
    ) -> None:
        """
        Args:
            proposer: proposes drafts from a sequence's own text.
            lengths: chooses how many tokens of each draft are verified.
            num_drafts: maximum draft tokens of a sequence in a step, at most `MAX_DRAFT_TOKENS`.
            draft_model: draft model or heads, which propose a draft if the text has none or a worse one.
            depth: chooses how many tokens the model or the heads propose; by default, as many as increase the expected
                tokens per second.
            is_rejecting: whether drafts of sampled requests are accepted by the rejection rule.
            width: maximum number of candidates of heads for a token; with more than 1, their drafts are trees.
        """
        self._is_rejecting, self._width = is_rejecting, width
        self._proposer, self._lengths, self._num_drafts = proposer, lengths, num_drafts
        self._model, self._depth = draft_model, depth or DraftDepth(num_drafts)
        self._reader = draft_model if isinstance(draft_model, HiddenReader) else None
        self._prices = RowPrices()
        self._acceptance = Acceptance()
        self._states: dict[RequestId, SequenceDrafts] = {}
        self.counts = SpeculationCounts()

    def drafts(self, decoding: Iterable[Sequence], rows: int) -> Drafts:
        """Return the draft tokens that a step verifies.

        Args:
            decoding: the decoding sequences of the step.
            rows: rows of the step without drafts.
        """
        return self._chosen(decoding, rows, self._model)

    def _chosen(self, decoding: Iterable[Sequence], rows: int, model: ModelDrafts | None) -> Drafts:
        """Return the draft tokens of a step; a model proposes for sequences whose text has no draft or a worse one."""
        states = [(sequence, state) for sequence in decoding if (state := self._propose(sequence)) is not None]
        if model is not None:
            self._request_drafts(model, states, rows)
        proposed = [(sequence, state) for sequence, state in states if state.draft.tokens]
        if not proposed:
            return {}
        others = max(0, rows - len(proposed))
        gains = [state.draft.gains(state.acceptance) for _, state in proposed]
        lengths = self._lengths.choose([*gains, *([[]] * others)], rows, self._prices)
        return {
            sequence.request_id: state.draft.tokens[:length]
            for (sequence, state), length in zip(proposed, lengths, strict=False)
            if length
        }

    def sources(self, request_id: RequestId, count: int) -> DraftSources | None:
        """Return the distributions of the first `count` tokens of a sequence's draft; `None` if draft tokens are
        accepted by comparison with the drawn token.

        Args:
            request_id: id of the request.
            count: number of leading draft tokens that the step verifies.
        """
        state = self._states.get(request_id) if self._is_rejecting else None
        if state is None or state.drawing is None:
            return None
        return state.sources[:count] if state.sources else (None,) * count

    def parents(self, request_id: RequestId, count: int) -> tuple[int, ...]:
        """Return the parents of the first `count` tokens of a sequence's draft, if they are a tree; empty for a chain.

        Args:
            request_id: id of the request.
            count: number of leading draft tokens that the step verifies.
        """
        state = self._states.get(request_id)
        found = state.draft.parents[:count] if state is not None else ()
        return () if is_chain(found) else found

    def may_draft(self, decoding: Iterable[Sequence], rows: int) -> bool:
        """Return whether the next step may have drafts, without running a draft model.

        Args:
            decoding: the decoding sequences of the step.
            rows: rows of the step without drafts.
        """
        if self._model is not None:
            if self._num_proposed(self._model, rows, rows):
                return True
            self._depth.advance(0)  # the next step is planned without another call
        return bool(self._chosen(decoding, rows, None))

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verified draft.

        Args:
            num_drafts: number of draft tokens that the step verified.
            num_accepted: number of them that were accepted.
        """
        self.counts.num_drafts += 1
        self.counts.num_draft_tokens += num_drafts
        self.counts.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.counts.accepted_by_position[position] += 1

    def read(self, plan: StepPlan, result: StepResult, has_sequence: Callable[[ScheduledSequence], bool]) -> None:
        """Give heads the hidden states of a step's accepted tokens, before the scheduler records the step.

        Args:
            plan: the step.
            result: its result.
            has_sequence: whether an item's sequence still exists.
        """
        if self._reader is None or result.hidden is None:
            return
        first = 0
        for item in plan.scheduled:
            if item.sampling.speculation and has_sequence(item):
                hidden = result.hidden[_accepted_rows(item, result, first)]
                self._reader.read(item.request_id, item.num_computed, hidden)
            first += item.num_scheduled

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step; steps with prompts are ignored.

        Args:
            plan: the step's plan.
            seconds: its duration.
        """
        if all(item.is_decode for item in plan.scheduled):
            self._prices.observe(plan.num_tokens, seconds)

    def forget(self, request_id: RequestId) -> None:
        """Drop the state of a sequence that has ended. Idempotent."""
        self._states.pop(request_id, None)
        if self._model is not None:
            self._model.forget(request_id)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence has a state, or pages of the draft model."""
        return not self._states and (self._model is None or self._model.is_idle)

    def _propose(self, sequence: Sequence) -> SequenceDrafts | None:
        """Propose draft tokens for a sequence; `None` if it may have none."""
        request = sequence.request
        limit = min(self._num_drafts, request.max_tokens_total - sequence.num_tokens - 1, _before_bans_end(sequence))
        if limit < 1 or request.exports or not request.sampling.speculation:
            return None
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._states[sequence.request_id] = SequenceDrafts(self._acceptance)
            is_chain_only = chain_reason(request.sampling, is_rejecting=self._is_rejecting) is not None
            state.width = 1 if is_chain_only else self._width
            state.drawing = _drawing(sequence) if self._is_rejecting else None
        if state.start == sequence.num_tokens:
            return state
        state.tokens.extend(sequence.sampling.tokens[len(state.tokens) :])
        is_right = state.compare()
        if is_right is not None:
            state.choice.compared(_MODEL, is_right=is_right)
        draft = self._proposer.propose(state.tokens.view(), limit)
        state.limit, state.match, state.is_requested, state.is_of_model = limit, draft.match, False, False
        self._take(state, sequence, SupportedDraft(draft.tokens, _supports(draft)))
        return state

    def _take(self, state: SequenceDrafts, sequence: Sequence, draft: SupportedDraft) -> None:
        """Store a draft for the sequence, cut to what its constraint, its stop tokens and its length allow."""
        state.start, state.draft, state.sources = sequence.num_tokens, draft, ()
        if sequence.sampling.mask is not None:
            self._constrain(state, sequence, state.limit)
        state.draft = state.draft.before(sequence.request.eos_token_ids, sequence.request.sampling.stop_token_ids)
        room = sequence.request.max_tokens_total - sequence.num_tokens - 1  # each row of a tree needs a KV slot
        state.draft = state.draft.best_first(state.acceptance, min(MAX_NODES, room))

    def _request_drafts(self, model: ModelDrafts, states: list[tuple[Sequence, SequenceDrafts]], rows: int) -> None:
        """Let the draft model propose for the sequences whose text has no draft, or a worse one."""
        able = [(sequence, state) for sequence, state in states if not state.is_requested and not state.draft.is_forced]
        if not able:
            return
        depth = self._num_proposed(model, len(able), rows)
        drafting = depth * model.prices.seconds(len(able)) / len(able) if model.is_measured else 0.0
        due = [one for one in able if depth and self._prefers_model(one[1], depth, drafting, rows)]
        if due:
            depth = self._num_proposed(model, len(due), rows)
        if due or not depth:
            self._depth.advance(depth)
        if not due or not depth:
            return
        requests = [
            DraftRequest(
                sequence.request_id, sequence.sampling.tokens, min(depth, state.limit), state.drawing, state.width
            )
            for sequence, state in due
        ]
        drafts = model.propose(requests, depth)
        for sequence, state in due:
            state.is_requested = True
            if (draft := drafts.get(sequence.request_id)) is not None:
                state.is_of_model, state.other = True, state.draft
                self._take(state, sequence, SupportedDraft(draft.tokens, draft.supports, draft.parents))
                state.sources = draft.sources  # drawn tokens are never cut

    def _prefers_model(self, state: SequenceDrafts, depth: int, drafting: float, rows: int) -> bool:
        """Return whether the model drafts for a sequence, rather than its text.

        Args:
            state: the sequence's state.
            depth: number of tokens that the model proposes, at least 1.
            drafting: time that the model takes for this sequence, in seconds; 0 before it was measured.
            rows: rows of the step without drafts, one per sequence.
        """
        if not state.draft.tokens or not drafting:
            return True
        if self._depth.is_fixed:
            return state.match < _LONG_MATCH
        text = ExpectedDraft(state.draft.probabilities(state.acceptance))
        guessed = ExpectedDraft([state.acceptance.of_model] * min(depth, state.limit), drafting)
        return state.choice.choose({_TEXT: text, _MODEL: guessed}, rows, rows, self._prices.seconds) == _MODEL

    def _num_proposed(self, model: ModelDrafts, sequences: int, rows: int) -> int:
        seconds = model.prices.seconds if model.is_measured else None
        return self._depth.choose(sequences, rows, self._acceptance.of_model, self._prices.seconds, seconds)

    def _constrain(self, state: SequenceDrafts, sequence: Sequence, limit: int) -> None:
        """Put tokens that the constraint forces first, and cut the draft where the constraint rejects it."""
        assert sequence.sampling.mask is not None
        forced = tuple(sequence.sampling.mask.forced_tokens()[:limit])
        if forced:
            tail = self._extended(state, forced, limit)
            state.draft = SupportedDraft(forced + tail.tokens, (FORCED,) * len(forced) + _supports(tail))
        count = sequence.sampling.mask.num_allowed(state.draft.tokens)
        state.draft = SupportedDraft(state.draft.tokens[:count], state.draft.supports[:count])

    def _extended(self, state: SequenceDrafts, forced: tuple[int, ...], limit: int) -> Draft:
        """Propose tokens that follow the tokens forced by a constraint."""
        if len(forced) == limit:
            return NO_DRAFT
        text = TokenArray()
        text.extend([*state.tokens.view().tolist(), *forced])
        return self._proposer.propose(text.view(), limit - len(forced))


def _accepted_rows(item: ScheduledSequence, result: StepResult, first: int) -> slice | list[int]:
    """Return the rows of the step whose tokens now belong to the sequence, in order of position."""
    output = result.outputs.get(item.request_id)
    if output is not None and output.path:
        root = first + item.num_scheduled - item.num_drafts - 1
        return [*range(first, root + 1), *(root + row for row in output.path)]
    return slice(first, first + _num_accepted(item, result))


def _num_accepted(item: ScheduledSequence, result: StepResult) -> int:
    """Return the number of leading scheduled tokens that now belong to the sequence."""
    output = result.outputs.get(item.request_id)
    if output is not None:
        return output.accepted
    return item.num_scheduled - item.num_sampled if item.request_id not in result.failures else 0


def _supports(draft: Draft) -> tuple[int, ...]:
    """Return the support of each token of a draft from the text."""
    return (support_of_match(draft.match),) * len(draft.tokens)


def _drawing(sequence: Sequence) -> Drawing | None:
    """Return the parameters of a sequence's draws for the rejection rule; `None` if its drafts are accepted by
    comparison with the drawn token. The rejection rule would be wrong for a draft that a constraint cuts at a drawn
    token; for a greedy request, both rules are the same."""
    sampling = sequence.request.sampling
    if sampling.is_greedy or sampling.seed is None or sampling.constraint is not None:
        return None
    request = sequence.request
    return Drawing(sampling, request.sample_index, frozenset((*request.eos_token_ids, *sampling.stop_token_ids)))


def _before_bans_end(sequence: Sequence) -> int:
    """Return the maximum number of draft tokens. While end tokens are banned, they must be banned in all rows."""
    if not sequence.sampling.banned_after(0):
        return MAX_DRAFT_TOKENS
    return sequence.request.sampling.min_tokens - sequence.sampling.num_generated - 1


def speculation_of(settings: SpeculationSettings, draft_model: ModelDrafts | None = None) -> Speculation | None:
    """Create the speculation of an engine; `None` if it is off.

    Args:
        settings: the settings.
        draft_model: the draft model or the heads, for the methods `draft`, `eagle` and `medusa`.
    """
    if settings.method == OFF:
        return None
    proposer: Proposer = SuffixProposer(min_length=settings.min_match)
    if settings.method == NGRAM:
        proposer = NgramProposer(min_length=settings.min_match, max_length=settings.max_match)
    is_paying = settings.method in (AUTO, *MODEL_METHODS) and not settings.is_fixed
    lengths: Lengths = PayingDrafts() if is_paying else WholeDrafts()
    depth = DraftDepth(settings.num_drafts, is_fixed=settings.is_fixed)
    return Speculation(
        proposer,
        lengths,
        num_drafts=settings.num_drafts,
        draft_model=draft_model,
        depth=depth,
        is_rejecting=settings.is_rejecting,
        width=settings.width,
    )
