"""The rejection rule for draft tokens (Leviathan et al., Fast Inference from Transformers via Speculative Decoding,
2023, algorithm 1; Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023, theorem 1).

    draft token x, drawn from q:   accepted with probability min(1, p(x) / q(x)),
                                   otherwise the token is drawn from max(0, p - q), normalized

The token has the distribution p for every q, and x is accepted with the probability sum of min(p, q), the largest of
any rule. A token that was not drawn, such as one from the text, has q(x) = 1. The number of draft tokens must not
depend on their values. The random numbers for the token, for its draft and for the acceptance are independent
(`core.philox`).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.core.philox import uniform
from kvferry.engine.schedule.step.step import DraftSource

Floats = npt.NDArray[np.float64]

MAX_SOURCE_TOKENS = 1024
"""Maximum number of tokens in a draft's distribution, which keeps the most probable ones; a draft token takes 16
KiB."""
_TOKEN, _DRAFT, _ACCEPTANCE = 0, 1, 2
"""Numbers of the random draws at a position."""


class ProposedToken(NamedTuple):
    """A draft token to verify."""

    token: int
    source: DraftSource | None
    """Distribution from which it was drawn; `None` if it was not drawn."""


def verified(p: Floats, proposed: ProposedToken, seed: int, sample_index: int, position: int) -> int:
    """Return the token of a row with a draft token. The result equals the draft token exactly if it is accepted.

    Args:
        p: [vocabulary] distribution of the token.
        proposed: the draft token.
        seed: seed of the request.
        sample_index: index of the sample.
        position: index of the token in the sequence.
    """
    token, source = proposed
    share = 1.0 if source is None else _share(source, token)
    # A draft token with probability 0 was not drawn from its source; it is rejected.
    if share > 0.0 and uniform(seed, sample_index, position, _ACCEPTANCE) * share < p[token]:
        return token
    rest = _remaining(p, token, source)
    return _select(rest if rest.any() else p, uniform(seed, sample_index, position, _TOKEN))


def drawn(p: Floats, seed: int, sample_index: int, position: int) -> tuple[int, DraftSource]:
    """Draw a draft token; return it and the distribution from which it was drawn: the most probable tokens of p.

    Args:
        p: [vocabulary] distribution of the draft model.
        seed: seed of the request.
        sample_index: index of the sample.
        position: index of the token in the sequence.
    """
    ids = np.flatnonzero(p)
    if len(ids) > MAX_SOURCE_TOKENS:
        ids = np.sort(ids[np.argpartition(-p[ids], MAX_SOURCE_TOKENS)[:MAX_SOURCE_TOKENS]])
    shares = p[ids] / p[ids].sum()
    token = int(ids[_select(shares, uniform(seed, sample_index, position, _DRAFT))])
    return token, DraftSource(ids, shares)


def _remaining(p: Floats, token: int, source: DraftSource | None) -> Floats:
    """Return max(0, p - q), not normalized."""
    rest = p.copy()
    if source is None:
        rest[token] = 0.0
    else:
        rest[source.ids] = np.maximum(rest[source.ids] - source.probabilities, 0.0)
    return rest


def _share(source: DraftSource, token: int) -> float:
    index = int(np.searchsorted(source.ids, token))
    is_found = index < len(source.ids) and source.ids[index] == token
    return float(source.probabilities[index]) if is_found else 0.0


def _select(weights: Floats, u: float) -> int:
    """Return the first index up to which the weights sum to more than `u` times the sum of all."""
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, u * float(sums[-1]), side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # only rounding makes `u * sum` reach the sum
