"""Candidates of heads: which of them are drafted, and drafts made of them."""

from collections.abc import Sequence

from kvferry.engine.schedule.speculation.acceptance import MIN_CONFIDENCE, support_of_confidence
from kvferry.engine.schedule.speculation.model_drafts import ModelDraft
from kvferry.engine.schedule.speculation.trees.growing_tree import MIN_CANDIDATE, Candidate, TreeRows


def worth_verifying(candidates: Sequence[Candidate], width: int) -> list[Candidate]:
    """Return the candidates of a row that a draft contains, at most `width`.

    Args:
        candidates: tokens with their probabilities, most probable first.
        width: maximum number of candidates; with 1, the draft is a chain.
    """
    least = MIN_CONFIDENCE if width == 1 else MIN_CANDIDATE
    return [(token, share) for token, share in candidates[:width] if share >= least]


def model_draft(draft: TreeRows) -> ModelDraft:
    """Return a draft with the support of each token."""
    supports = tuple(support_of_confidence(share) for share in draft.probabilities)
    return ModelDraft(draft.tokens, supports, parents=draft.parents)
