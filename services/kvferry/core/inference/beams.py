"""Parameters of a beam search."""

from dataclasses import dataclass
from typing import Literal

from kvferry.core.sampling import MAX_OUTPUT_TOKENS, Range, SamplingParams, check_flag

MAX_WIDTH = 8
_RANGES = {
    "width": Range(1, MAX_WIDTH),
    "max_tokens": Range(1, MAX_OUTPUT_TOKENS),
    "length_penalty": Range(-10.0, 10.0, is_whole=False),
}


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search."""

    width: int = 4
    """Number of beams, 1 to 8."""
    max_tokens: int = 64
    """Maximum number of output tokens."""
    length_penalty: float = 1.0
    """Exponent of the length by which the sum of log-probabilities is divided; above 0 favors long outputs."""
    early_stopping: bool | Literal["never"] = False
    """Whether to stop as soon as `width` outputs have ended. Otherwise the search continues while a live beam has a
    better score than the worst of them, or, with `never`, while one could reach a better score at `max_tokens`: this
    differs only for a length penalty above 0."""
    ignore_eos: bool = False
    """Whether end-of-sequence tokens are treated like other tokens."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidRequest: a field is out of range or has the wrong type.
        """
        for name, limits in _RANGES.items():
            limits.check(name, getattr(self, name))
        check_flag("ignore_eos", self.ignore_eos)
        if self.early_stopping != "never":
            check_flag("early_stopping", self.early_stopping, or_else="'never'")

    def step_sampling(self, max_tokens: int) -> SamplingParams:
        """Return the parameters of a request that computes the next token of a beam, with its alternatives."""
        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0, logprobs=2 * self.width, speculation=False
        )
