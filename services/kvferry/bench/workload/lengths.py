"""Lengths of prompts and outputs: uniform around a mean, or heavy-tailed as in published traces.

Mean lengths of ShareGPT and Alpaca are from Kwon et al., Efficient Memory Management for Large Language Model Serving
with PagedAttention, 2023, figure 11. The distributions were not published; they are approximated by log-normal lengths
with these means after truncation, and with more spread for ShareGPT.
"""

import math
from dataclasses import dataclass
from random import Random

from kvferry.core.errors import UsageError

UNIFORM, SHAREGPT, ALPACA = "uniform", "sharegpt", "alpaca"
MIXES = (UNIFORM, SHAREGPT, ALPACA)
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Distribution of (input, output) lengths."""

    kind: str = UNIFORM
    """One of `MIXES`. The heavy-tailed mixes ignore the means and the spread."""
    num_input: int = 512
    """Mean number of input tokens."""
    num_output: int = 128
    spread: float = 0.0
    """Relative spread of `uniform`: with 0.5, lengths are between 0.5 and 1.5 times the mean."""
    max_tokens: int = 2048
    """Maximum of input and output together for the heavy-tailed mixes: the context length of the traces' models."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: the kind is unknown, or a number is out of range.
        """
        if self.kind not in MIXES:
            raise UsageError(f"unknown lengths {self.kind!r}; expected one of {', '.join(MIXES)}", field="lengths")
        for name, low in (("num_input", 1), ("num_output", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if not low <= value <= _MAX_TOKENS:
                raise UsageError(f"{name} must be between {low} and {_MAX_TOKENS}, not {value}", field=name)
        if not 0.0 <= self.spread < 1.0:
            raise UsageError(f"spread must be at least 0 and below 1, not {self.spread}", field="spread")

    def draw(self, draw: Random) -> tuple[int, int]:
        """Draw the numbers of input and output tokens of a request, each at least 1."""
        if self.kind == UNIFORM:
            return self._around(self.num_input, draw), self._around(self.num_output, draw)
        (mean_in, sigma_in), (mean_out, sigma_out) = _HEAVY[self.kind]
        # Rejection keeps the distribution's shape below the limit; at most a few percent of the draws are rejected.
        while True:
            num_input = math.ceil(draw.lognormvariate(mean_in, sigma_in))
            num_output = math.ceil(draw.lognormvariate(mean_out, sigma_out))
            if num_input + num_output <= self.max_tokens:
                return num_input, num_output

    def _around(self, mean: int, draw: Random) -> int:
        if not self.spread:
            return mean
        return max(1, round(mean * draw.uniform(1.0 - self.spread, 1.0 + self.spread)))


_HEAVY = {
    # Mean and standard deviation of the logarithm of the length: input, output
    SHAREGPT: ((4.466, 1.2), (5.448, 1.0)),
    ALPACA: ((2.809, 0.5), (3.651, 0.9)),
}
