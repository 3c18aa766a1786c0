"""What the sequences of a step wish of their rows of logits: who needs a draw, where it can be made, by which numbers.

The most likely token is known of every row, so most rows need nothing more. `sampler` draws the others on the host. A
runner that stays on a GPU draws them there by the same rules, from the arrays made here, but for those that want
log-probabilities: the host must see their logits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.core.sampling import SamplingParams
from kvferry.engine.step import ScheduledSequence

Entries = Mapping[int, float]


class Way(Enum):
    """How a row's token comes about."""

    BEST = "best"
    """The most likely one, as the logits stand."""
    DRAWN = "drawn"
    """On the device."""
    HOST = "host"
    """By the host's sampler."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """For each row some tokens with a number each: `starts[r] .. starts[r + 1]`."""

    starts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Before the draw, in the order of the fields; `None`: nobody wishes any."""

    bias: Ragged | None
    seen: Ragged | None
    generated: Ragged | None
    banned: Ragged | None

    @property
    def is_empty(self) -> bool:
        """Whether logits stay as they are."""
        return self.bias is self.seen is self.generated is self.banned is None


def alters(s: ScheduledSequence) -> bool:
    """Whether logits are changed before the draw."""
    p = s.sampling
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return bool(p.logit_bias or penalties or s.banned_token_ids)


def way_of(s: ScheduledSequence) -> Way:
    """How a sequence's token is drawn."""
    if s.sampling.logprobs is not None:
        return Way.HOST
    return Way.BEST if s.sampling.is_greedy and not alters(s) else Way.DRAWN


def reads_tokens(s: ScheduledSequence) -> bool:
    """Whether the draw depends on the very tokens before it, so that the host must know them first."""
    p = s.sampling
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)


def seed_of(s: ScheduledSequence) -> int:
    """The low 64 bits of the seed, as a signed number; of a greedy sequence, anything.

    Raises:
        InvariantBroken: it draws, and has none.
    """
    if s.sampling.is_greedy:
        return 0
    return (drawn_seed(s) + (1 << 63)) % (1 << 64) - (1 << 63)


def drawn_seed(s: ScheduledSequence) -> int:
    """The seed of a sequence that draws.

    Raises:
        InvariantBroken: it has none.
    """
    if s.sampling.seed is None:
        raise InvariantBroken(f"request {s.request_id} came without a seed; the edge draws one")
    return s.sampling.seed


def not_finite(s: ScheduledSequence) -> InvariantBroken:
    """What is wrong where a logit of a sequence's row is no finite number."""
    return InvariantBroken(
        f"request {s.request_id}: a logit at position {s.num_computed + s.num_scheduled} is not a finite number;"
        " the weights or the pages are damaged"
    )


def lists_of(sequences: Sequence[ScheduledSequence], vocabulary: int) -> Lists:
    """The lists of some rows, one for each sequence."""

    def each(entries: Callable[[ScheduledSequence], Entries]) -> Ragged | None:
        return _ragged([entries(s) for s in sequences], vocabulary)

    return Lists(each(_bias), each(_seen), each(_generated), each(_banned))


def _bias(s: ScheduledSequence) -> Entries:
    return s.sampling.logit_bias


def _seen(s: ScheduledSequence) -> Entries:
    penalty = s.sampling.repetition_penalty
    return dict.fromkeys(sorted(set(s.token_ids)), penalty) if penalty != 1.0 else {}


def _generated(s: ScheduledSequence) -> Entries:
    p: SamplingParams = s.sampling
    if not (p.presence_penalty or p.frequency_penalty):
        return {}
    counts = Counter(s.token_ids[s.num_prompt :])
    return {token: p.frequency_penalty * times + p.presence_penalty for token, times in counts.items()}


def _banned(s: ScheduledSequence) -> Entries:
    return dict.fromkeys(s.banned_token_ids, 0.0)


def _ragged(rows: Sequence[Entries], vocabulary: int) -> Ragged | None:
    known = [{token: value for token, value in row.items() if token < vocabulary} for row in rows]
    lengths = [len(row) for row in known]
    if not any(lengths):
        return None
    return Ragged(
        np.cumsum([0, *lengths], dtype=np.int32),
        np.fromiter(_flat(known), np.int32),
        np.fromiter((value for row in known for value in row.values()), np.float64),
        max(lengths),
    )


def _flat(rows: Iterable[Entries]) -> Iterable[int]:
    return (token for row in rows for token in row)
