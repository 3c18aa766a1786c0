"""Tokens and last draft of a sequence, which is a chain or a tree, and its comparison with the sampled tokens. Pure."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvferry.engine.schedule.speculation.acceptance import FORCED, Acceptance, SequenceAcceptance
from kvferry.engine.schedule.speculation.matches import TokenArray
from kvferry.engine.schedule.speculation.model_drafts import Drawing
from kvferry.engine.schedule.speculation.proposer_choice import ProposerChoice
from kvferry.engine.schedule.speculation.trees.growing_tree import ranked, values_of, without
from kvferry.engine.schedule.step.draft_tree import children
from kvferry.engine.schedule.step.step import DraftSource


class SupportedDraft(NamedTuple):
    """A draft, with the support of each token (`acceptance`)."""

    tokens: tuple[int, ...] = ()
    supports: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Row of each token's parent in a tree, in topological order; empty for a chain."""

    @property
    def is_forced(self) -> bool:
        """Whether the draft begins with a token that a constraint forces."""
        return bool(self.supports) and self.supports[0] == FORCED

    def before(self, *ends: Collection[int]) -> "SupportedDraft":
        """Return the draft without the tokens that would end the sequence and those after them, since nothing follows
        them.

        Args:
            ends: sets of tokens that end the sequence.
        """
        last = {index for index, token in enumerate(self.tokens) if any(token in tokens for tokens in ends)}
        if not last:
            return self
        if not self.parents:
            return SupportedDraft(self.tokens[: min(last)], self.supports[: min(last)])
        kept, parents = without(self.parents, last)
        return SupportedDraft(
            tuple(self.tokens[index] for index in kept), tuple(self.supports[index] for index in kept), parents
        )

    def best_first(self, acceptance: SequenceAcceptance, limit: int) -> "SupportedDraft":
        """Return a tree with its tokens in descending order of the probability that they are accepted, at most `limit`.

        Args:
            acceptance: estimates of the sequence.
            limit: maximum number of tokens.
        """
        if not self.parents:
            return self
        indices = ranked(range(len(self.tokens)), self.parents, self.probabilities(acceptance), limit)
        return SupportedDraft(
            tuple(self.tokens[index] for index in indices.tokens),
            tuple(self.supports[index] for index in indices.tokens),
            indices.parents,
        )

    def probabilities(self, acceptance: SequenceAcceptance) -> list[float]:
        """Return the estimated probability that each token is accepted, given that its path is."""
        return [acceptance.probability(support) for support in self.supports]

    def gains(self, acceptance: SequenceAcceptance) -> list[float]:
        """Return the estimated probability that each token is accepted."""
        return values_of(self.parents, self.probabilities(acceptance))

    def compare(self, actual: Sequence[int], acceptance: SequenceAcceptance) -> None:
        """Compare the draft with the tokens that were sampled since, up to the first that is not in the draft.

        Args:
            actual: the sampled tokens.
            acceptance: records which draft tokens were right.
        """
        if self.parents:
            self._compare_tree(actual, acceptance)
            return
        for support, token, drawn in zip(self.supports, self.tokens, actual, strict=False):
            acceptance.add(support, token == drawn)
            if token != drawn:
                break

    def _compare_tree(self, actual: Sequence[int], acceptance: SequenceAcceptance) -> None:
        row = 0
        for drawn in actual:
            found = list(children(self.parents, row))
            right = next((child for child in found if self.tokens[child - 1] == drawn), None)
            for child in found:
                acceptance.add_candidate(self.supports[child - 1], child == right)
            if found:
                acceptance.add_level(right is not None)
            if right is None:
                return
            row = right

    def is_right(self, drawn: int) -> bool:
        """Return whether a token is one of the draft's first tokens.

        Args:
            drawn: the token that was sampled first.
        """
        if self.parents:
            return any(self.tokens[child - 1] == drawn for child in children(self.parents, 0))
        return self.tokens[0] == drawn


NOTHING = SupportedDraft()


class SequenceDrafts:
    """Tokens and last draft of a sequence."""

    __slots__ = (
        "acceptance",
        "choice",
        "draft",
        "drawing",
        "is_of_model",
        "is_requested",
        "limit",
        "match",
        "other",
        "sources",
        "start",
        "tokens",
        "width",
    )

    def __init__(self, acceptance: Acceptance) -> None:
        self.tokens = TokenArray()
        self.acceptance = SequenceAcceptance(acceptance)
        self.draft = NOTHING
        self.start = 0
        """Number of tokens before `draft`."""
        self.limit = 0
        """Maximum number of tokens of `draft`, and of levels of a tree."""
        self.width = 1
        """Maximum number of candidates for a token; 1 for chains."""
        self.is_requested = False
        """Whether a draft of the model has already been requested for these tokens."""
        self.is_of_model = False
        """Whether `draft` came from the draft model."""
        self.match = 0
        """Length of the match in the sequence's own text on which a draft is based."""
        self.other = NOTHING
        """Draft from the sequence's own text, if the model's draft was used instead."""
        self.choice = ProposerChoice()
        self.drawing: Drawing | None = None
        """Parameters of draws, if the rejection rule accepts the sequence's drafts."""
        self.sources: tuple[DraftSource, ...] = ()
        """Distributions from which the tokens of `draft` were drawn; empty if they were not drawn."""

    def compare(self) -> bool | None:
        """Compare the last draft with the tokens sampled since then, and also the draft from the sequence's own text if
        the model's was used. Return whether the first token of the model's draft was right; `None` without one."""
        actual = self.tokens.view()[self.start :].tolist()
        for draft in (self.draft, self.other):
            draft.compare(actual, self.acceptance)
        self.other = NOTHING
        if not self.is_of_model or not self.draft.tokens or not actual:
            return None
        return self.draft.is_right(actual[0])
