"""Token ids of simulated prompts and outputs: slices of one pseudo-random tape, so that a token costs eight bytes.

A prompt that shares nothing begins with a token that no other prompt has. Block names are a chain over all preceding
tokens (`core.hashing`), so its blocks differ from all other prompts' blocks although the tape repeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from kvferry.core.sampling import SampledToken

T = TypeVar("T")
_TAPE_TOKENS = 1 << 17
_NUM_IDS = 4000
_FIRST_ID = 300
UNIQUE_ID = 1 << 20
"""First of the ids that occur only once in a simulation."""
_STRIDE = 7919
"""Distance on the tape between the outputs of consecutive requests; prime, so that all positions are used."""


class Tape:
    """Pseudo-random tokens that repeat after `_TAPE_TOKENS`."""

    def __init__(self, seed: int) -> None:
        draw = Random(f"tape {seed}")  # noqa: S311  a workload needs no secret numbers
        known = [SampledToken(_FIRST_ID + index) for index in range(_NUM_IDS)]
        self._sampled = draw.choices(known, k=_TAPE_TOKENS)
        self._ids = [token.token_id for token in self._sampled]

    def ids(self, place: int, count: int) -> list[int]:
        """Return `count` token ids from a position on; positions beyond the end wrap around.

        Args:
            place: position on the tape.
            count: number of ids.
        """
        return _slice(self._ids, place, count)

    def sampled(self, place: int, count: int) -> tuple[SampledToken, ...]:
        """Return the same tokens as `ids`, as results of sampling.

        Args:
            place: position on the tape.
            count: number of tokens.
        """
        place %= _TAPE_TOKENS
        if place + count <= _TAPE_TOKENS:
            return tuple(self._sampled[place : place + count])
        return tuple(_slice(self._sampled, place, count))

    def unique(self, number: int, count: int) -> list[int]:
        """Return `count` token ids, the first of which belongs to `number` alone.

        Args:
            number: number of the request.
            count: number of ids.
        """
        return [UNIQUE_ID + number, *self.ids(number * _STRIDE, count - 1)] if count else []


def _slice(tokens: Sequence[T], place: int, count: int) -> list[T]:
    place %= len(tokens)
    found = list(tokens[place : place + count])
    while len(found) < count:
        found += tokens[: count - len(found)]
    return found


@dataclass(frozen=True, slots=True)
class Output:
    """The output that a request will have."""

    tape: Tape
    place: int
    count: int
    """Number of tokens, at least 1."""
    known: tuple[SampledToken, ...] | None = None
    """The tokens to use instead of the tape's; `None` to use the tape's."""

    @classmethod
    def of(cls, tape: Tape, number: int, count: int) -> "Output":
        """Return an output of `count` tokens for the request with this number."""
        return cls(tape, number * _STRIDE + 1, count)

    def sampled(self, first: int, count: int) -> tuple[SampledToken, ...]:
        """Return the tokens with the indices `first` .. `first` + `count` - 1.

        Args:
            first: index of the first token in the output.
            count: number of tokens.
        """
        if self.known is not None:
            return self.known[first : first + count]
        return self.tape.sampled(self.place + first, count)

    def ids(self) -> list[int]:
        """Return the ids of all tokens."""
        if self.known is not None:
            return [token.token_id for token in self.known]
        return self.tape.ids(self.place, self.count)
