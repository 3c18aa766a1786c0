"""Estimates of the probability that the next draft token is accepted, from earlier drafts.

All drafts are compared with the sampled tokens, also drafts that no step verified: a proposal that was not worth its
rows still shows whether the next one is. An estimate combines two counts, in which older events weigh less:

    probability  =  (hits of this sequence + W * probability of the match's length) / (tries of this sequence + W)
"""

_DECAY = 0.9
"""Factor by which the weight of a sequence's earlier events decreases at each event; about the last ten matter."""
_CLASS_DECAY = 0.99
_PRIOR_WEIGHT = 3.0
"""W: tries of a sequence that count as much as the events of all sequences."""
_CLASSES = (1, 2, 4, 8, 16)
"""Upper bounds of the classes of match lengths; longer matches form one more class."""
_FIRST_PROBABILITIES = (0.25, 0.4, 0.6, 0.7, 0.8, 0.85)
_FIRST_TRIES = 8.0
FORCED = 0
"""Match length of a draft token that a constraint forces."""
_FORCED_PROBABILITY = 0.95
_CONFIDENCES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Upper bounds of the classes of a draft model's probabilities; higher ones form one more class."""
_FIRST_CONFIDENCES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.96, 0.99)


def support_of(probability: float) -> int:
    """Return what stands for the match length of a token to which a draft model gives this probability: negative."""
    return -1 - next((i for i, most in enumerate(_CONFIDENCES) if probability < most), len(_CONFIDENCES))


class _Share:
    """Share of hits among tries; older tries weigh less."""

    __slots__ = ("_decay", "hits", "tries")

    def __init__(self, decay: float, *, hits: float = 0.0, tries: float = 0.0) -> None:
        self._decay, self.hits, self.tries = decay, hits, tries

    def add(self, is_hit: bool) -> None:
        self.hits = self._decay * self.hits + is_hit
        self.tries = self._decay * self.tries + 1.0


class Acceptance:
    """Acceptance by length of the match, over all sequences of an engine."""

    def __init__(self) -> None:
        first = (_FORCED_PROBABILITY, *_FIRST_PROBABILITIES, *_FIRST_CONFIDENCES)
        self._classes = [_Share(_CLASS_DECAY, hits=p * _FIRST_TRIES, tries=_FIRST_TRIES) for p in first]
        self._model = _Share(_CLASS_DECAY, hits=0.6 * _FIRST_TRIES, tries=_FIRST_TRIES)

    def add(self, match: int, is_hit: bool) -> None:
        """Record whether a draft token that was supported by a match of this length was right."""
        self._classes[_class_of(match)].add(is_hit)
        if match < FORCED:
            self._model.add(is_hit)

    @property
    def of_model(self) -> float:
        """The estimated probability that the next token of a draft model is right, whatever its confidence."""
        return self._model.hits / self._model.tries

    def probability(self, match: int) -> float:
        """Return the estimated probability that such a token is right."""
        found = self._classes[_class_of(match)]
        return found.hits / found.tries


class SequenceAcceptance:
    """Acceptance of one sequence's drafts."""

    __slots__ = ("_all", "_own")

    def __init__(self, all_sequences: Acceptance) -> None:
        self._all = all_sequences
        self._own = _Share(_DECAY)

    def add(self, match: int, is_hit: bool) -> None:
        """Record whether a draft token was right."""
        self._all.add(match, is_hit)
        if match > FORCED:
            self._own.add(is_hit)

    def probability(self, match: int) -> float:
        """Return the estimated probability that the next draft token is right, given that those before it are."""
        common = self._all.probability(match)
        if match <= FORCED:  # the draft model's confidence already depends on the sequence
            return common
        return (self._own.hits + _PRIOR_WEIGHT * common) / (self._own.tries + _PRIOR_WEIGHT)


def _class_of(match: int) -> int:
    if match == FORCED:
        return 0
    if match < FORCED:
        return len(_CLASSES) + 1 - match
    return 1 + next((i for i, most in enumerate(_CLASSES) if match <= most), len(_CLASSES))
