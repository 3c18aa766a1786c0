"""Estimates of the probability that the next draft token is accepted, from earlier drafts.

All drafts are compared with the sampled tokens, including drafts that no step verified: a proposal that was not worth
its rows still shows whether the next one will be. An estimate combines two counts in which older events have less
weight:

    probability  =  (hits of this sequence + W * probability of the support) / (tries of this sequence + W)

The *support* of a draft token is the class of its evidence: a constraint, the length of a match in the text, or the
confidence of a draft model.
"""

from bisect import bisect_left, bisect_right

_DECAY = 0.9
"""Factor by which the weight of a sequence's earlier events decreases at each event; about the last ten matter."""
_MODEL_DECAY = 0.95
"""Decay factor for tokens of a draft model, where each draft yields several events."""
_CLASS_DECAY = 0.99
_PRIOR_WEIGHT = 3.0
"""W: number of a sequence's tries that weigh as much as the events of all sequences."""
_FIRST_TRIES = 8.0
MIN_CONFIDENCE = 0.2
"""The draft of a model or a head ends before a token to which it assigns a lower probability than this."""
FORCED = 0
"""Support class of a token that a constraint forces."""
_MATCHES = (1, 2, 4, 8, 16)
"""Upper bounds of the classes of match lengths; longer matches form one more class."""
_CONFIDENCES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Lower bounds of the classes of a draft model's probabilities, except for the first class. Only trees have tokens
below `MIN_CONFIDENCE`."""
_FIRST_PROBABILITIES = (
    *(0.95,),  # forced
    *(0.25, 0.4, 0.6, 0.7, 0.8, 0.85),  # by length of the match
    *(0.06, 0.15, 0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.96, 0.99),  # by confidence
    *(0.6,),  # drawn
)
"""Assumed probabilities, by support."""
_FIRST_OF_MODEL = 2 + len(_MATCHES)
"""The lowest support of a draft model's tokens."""
DRAWN = len(_FIRST_PROBABILITIES) - 1
"""Support class of a token that was drawn from a draft model's distribution. It must not depend on the drawn token:
otherwise the number of verified tokens, and with it the distribution of the output, would depend on it."""
_MODEL_PROBABILITY = 0.6
"""Assumed probability of a draft model's token."""


def support_of_match(length: int) -> int:
    """Return the support of a token that follows a match of `length` tokens, 1 or more."""
    return 1 + bisect_left(_MATCHES, length)


def support_of_confidence(probability: float) -> int:
    """Return the support of a token to which a draft model assigns this probability, from 0 to 1."""
    return _FIRST_OF_MODEL + bisect_right(_CONFIDENCES, probability)


class _Share:
    """Share of hits among tries; older tries have less weight."""

    __slots__ = ("_decay", "hits", "tries")

    def __init__(self, decay: float, *, hits: float = 0.0, tries: float = 0.0) -> None:
        self._decay, self.hits, self.tries = decay, hits, tries

    def add(self, is_hit: bool) -> None:
        self.hits = self._decay * self.hits + is_hit
        self.tries = self._decay * self.tries + 1.0

    @property
    def share(self) -> float:
        """Hits per try; there must be a try."""
        return self.hits / self.tries


def _assumed(probability: float) -> _Share:
    return _Share(_CLASS_DECAY, hits=probability * _FIRST_TRIES, tries=_FIRST_TRIES)


class Acceptance:
    """Acceptance by support, over all sequences of an engine."""

    def __init__(self) -> None:
        self._by_support = [_assumed(probability) for probability in _FIRST_PROBABILITIES]
        self._of_model = _assumed(_MODEL_PROBABILITY)

    def add(self, support: int, is_hit: bool) -> None:
        """Record the outcome of a draft token with this support.

        Args:
            support: support class of the token (module docstring).
            is_hit: whether it equals the sampled token.
        """
        self._by_support[support].add(is_hit)
        if support >= _FIRST_OF_MODEL:
            self._of_model.add(is_hit)

    def add_candidate(self, support: int, is_hit: bool) -> None:
        """Record whether a candidate of a tree was right; see `add`."""
        self._by_support[support].add(is_hit)

    def add_level(self, is_hit: bool) -> None:
        """Record whether one of the candidates of a level of a tree was right."""
        self._of_model.add(is_hit)

    @property
    def of_model(self) -> float:
        """The estimated probability that a draft model's next token equals the sampled token, at any confidence."""
        return self._of_model.share

    def probability(self, support: int) -> float:
        """Return the estimated probability that a draft token with this support equals the sampled token."""
        return self._by_support[support].share


class SequenceAcceptance:
    """Acceptance of one sequence's drafts."""

    __slots__ = ("_all", "_own", "_own_of_model")

    def __init__(self, all_sequences: Acceptance) -> None:
        self._all = all_sequences
        self._own, self._own_of_model = _Share(_DECAY), _Share(_MODEL_DECAY)

    def add(self, support: int, is_hit: bool) -> None:
        """Record the outcome of a verified draft token.

        Args:
            support: support class of the token (module docstring).
            is_hit: whether it equals the sampled token.
        """
        self._all.add(support, is_hit)
        if _is_match(support):
            self._own.add(is_hit)
        elif support >= _FIRST_OF_MODEL:
            self._own_of_model.add(is_hit)

    def add_candidate(self, support: int, is_hit: bool) -> None:
        """Record whether a candidate of a tree was right; see `add`."""
        self._all.add_candidate(support, is_hit)

    def add_level(self, is_hit: bool) -> None:
        """Record whether one of the candidates of a level of a tree was right. The share of such levels is that of the
        model's tokens, since it bounds the depth that a tree is worth."""
        self._all.add_level(is_hit)
        self._own_of_model.add(is_hit)

    @property
    def of_model(self) -> float:
        """The estimated probability that a draft model's next token equals the sampled token, at any confidence."""
        return _combined(self._own_of_model, self._all.of_model)

    def probability(self, support: int) -> float:
        """Return the estimated probability that the next draft token equals the sampled token, given that all earlier
        ones did."""
        common = self._all.probability(support)
        if support == DRAWN:
            return _combined(self._own_of_model, common)
        if not _is_match(support):
            return common
        return _combined(self._own, common)


def _combined(own: _Share, common: float) -> float:
    """Combine the events of a sequence with the probability over all sequences."""
    return (own.hits + _PRIOR_WEIGHT * common) / (own.tries + _PRIOR_WEIGHT)


def _is_match(support: int) -> bool:
    """Return whether the support is a match in the text. How far text repeats itself depends on the sequence, so only
    these supports are estimated per sequence: forced tokens do not depend on it, and a draft model's confidence already
    reflects it."""
    return FORCED < support < _FIRST_OF_MODEL
