"""The beams of one prompt: candidates are ranked, ended ones are collected, and the search stops. Pure.

    live beams    each with its 2 * width most likely next tokens
    candidates    all of them, by the sum of their log-probabilities
    ended         candidates among the best `width` that end with an end-of-sequence token
    live          the best `width` candidates that do not end

With 2 * width tokens of each beam, at least `width` candidates do not end if there is one end token. The score of an
output is the sum of its log-probabilities divided by its length to the power of the length penalty (Wu et al., Google's
Neural Machine Translation System, 2016, section 7, in the form that `transformers` uses).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.beams import BeamParams
from kvferry.core.sampling import FinishReason, SamplingParams

_APPLIED = frozenset({"max_tokens", "ignore_eos", "skip_special_tokens", "truncate_prompt_tokens"})
"""Sampling parameters that a beam search applies."""
_WITHOUT_EFFECT = frozenset({"seed", "speculation"})
"""Sampling parameters that never change the outputs of a beam search."""
_TEMPERATURES = (0.0, 1.0)
"""Temperatures that leave the model's distribution and its order as they are."""

Alternatives = Sequence[tuple[int, float]]
"""(token id, log-probability) of the most likely next tokens of a beam, most likely first."""


def check_beam_sampling(sampling: SamplingParams) -> None:
    """Check that sampling parameters have no effect that a beam search lacks: each has its default, or is one that the
    search applies, or never changes its outputs. The temperature is 0 or 1.

    Raises:
        InvalidRequest: a parameter cannot be combined with a beam search.
    """
    if sampling.temperature not in _TEMPERATURES:
        raise InvalidRequest(
            f"temperature must be 0 or 1 with a beam search, which uses the model's own probabilities, not "
            f"{sampling.temperature:g}",
            field="temperature",
        )
    default = SamplingParams()
    for name in (f.name for f in fields(SamplingParams)):
        if name in _APPLIED | _WITHOUT_EFFECT | {"temperature"} or getattr(sampling, name) == getattr(default, name):
            continue
        what = "a constraint" if name == "constraint" else name
        raise InvalidRequest(f"{what} cannot be combined with a beam search; leave it out", field=name)


@dataclass(frozen=True, slots=True)
class Beam:
    """A partial or whole output."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    """Sum of the tokens' log-probabilities."""
    finish_reason: FinishReason | None = None

    def score(self, length_penalty: float) -> float:
        """Return the score by which outputs of different lengths are compared.

        Args:
            length_penalty: exponent of the number of tokens, by which the log-probability is divided.
        """
        return self.logprob / float(max(1, len(self.tokens)) ** length_penalty)


@dataclass(slots=True)
class Beams:
    """State of the search of one prompt."""

    params: BeamParams
    eos_token_ids: frozenset[int]
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    """Partial outputs, the most probable first; one at the start."""
    ended: list[Beam] = field(default_factory=list)
    """The best outputs that have ended, at most `width`, the best first."""
    is_done: bool = False

    def advance(self, alternatives: Sequence[Alternatives]) -> None:
        """Extend the live beams by one token.

        Args:
            alternatives: the 2 * width most likely next tokens of each live beam; fewer if the vocabulary is smaller.
        """
        params = self.params
        candidates = [
            Beam((*beam.tokens, token), beam.logprob + logprob)
            for beam, own in zip(self.live, alternatives, strict=True)
            for token, logprob in own
        ]
        candidates.sort(key=lambda beam: -beam.logprob)  # stable: among equals, the better beam's likelier token first
        is_last = len(candidates[0].tokens) >= params.max_tokens
        self.live = []
        for rank, beam in enumerate(candidates):
            if self._ends(beam):
                if rank < params.width:
                    self._end(beam, FinishReason.STOP)
            elif is_last and rank < params.width:
                self._end(beam, FinishReason.LENGTH)
            elif len(self.live) < params.width:
                self.live.append(beam)
        self.is_done = is_last or not self.live or self._is_settled()
        if self.is_done:
            self.live = []

    def best(self, count: int) -> list[Beam]:
        """Return the `count` best outputs of a search that is done, the best first."""
        return self.ended[:count]

    def _ends(self, beam: Beam) -> bool:
        return not self.params.ignore_eos and beam.tokens[-1] in self.eos_token_ids

    def _end(self, beam: Beam, reason: FinishReason) -> None:
        self.ended.append(Beam(beam.tokens, beam.logprob, reason))
        self.ended.sort(key=lambda each: -each.score(self.params.length_penalty))
        del self.ended[self.params.width :]

    def _is_settled(self) -> bool:
        """Return whether no live beam can replace an ended one."""
        if len(self.ended) < self.params.width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty, best = self.params.length_penalty, self.live[0]
        attainable = best.score(penalty)
        if self.params.early_stopping == "never" and penalty > 0:
            attainable = best.logprob / float(self.params.max_tokens**penalty)
        return self.ended[-1].score(penalty) >= attainable
