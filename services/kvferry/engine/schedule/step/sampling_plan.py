"""Sampling plan of a step: the sampling path of each row (greedy, device or host), and arrays of logit adjustments.

Models return the argmax of every row, so greedy rows need no further work. `sampler` samples the other rows on the
host. A GPU runner samples them on the device by the same rules, from the arrays built here; rows that need
log-probabilities are copied to the host.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import NOTHING_TO_SAMPLE, GenerationFailed, InvalidRequest, InvariantBroken
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.step.step import ScheduledSequence

Entries = Mapping[int, float]


class SamplingPath(Enum):
    """Method by which a row's token is sampled."""

    BEST = "best"
    """Argmax of the unmodified logits."""
    DRAWN = "drawn"
    """Drawn on the device."""
    HOST = "host"
    """Drawn by the host's sampler."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Ragged lists of (token id, value), one list per row; row r has the entries `starts[r] .. starts[r + 1] - 1`."""

    starts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Adjustments of logits before the draw, applied in the order of the fields; a field is `None` if no row uses
    it."""

    bias: Ragged | None
    seen: Ragged | None
    generated: Ragged | None
    banned: Ragged | None

    @property
    def is_empty(self) -> bool:
        """Whether no row's logits are adjusted."""
        return self.bias is self.seen is self.generated is self.banned is None


def alters(s: ScheduledSequence) -> bool:
    """Return whether the sequence's logits are adjusted before the draw."""
    p = s.sampling
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return bool(p.logit_bias or penalties or s.banned_token_ids or p.allowed_token_ids or p.bad_word_token_ids)


def sampling_path(s: ScheduledSequence) -> SamplingPath:
    """Select the sampling path of a sequence's token."""
    p = s.sampling
    if p.logprobs is not None or s.mask is not None or p.allowed_token_ids or (p.typical_p < 1.0 and not p.is_greedy):
        return SamplingPath.HOST
    return SamplingPath.BEST if s.sampling.is_greedy and not alters(s) else SamplingPath.DRAWN


def reads_tokens(s: ScheduledSequence) -> bool:
    """Return whether the draw depends on the values of earlier tokens, which must then be on the host first."""
    p = s.sampling
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return bool(penalties) or any(len(word) > 1 for word in p.bad_word_token_ids)


def needs_host(s: ScheduledSequence) -> bool:
    """Return whether the host needs the earlier tokens, or the logits, before the token can be sampled."""
    return reads_tokens(s) or sampling_path(s) is SamplingPath.HOST


def banned_now(s: ScheduledSequence) -> list[int]:
    """Return the token ids that must not be sampled: the ids banned by the plan, and the last token of each bad word
    whose other tokens were just generated. A bad word that begins in the prompt is not part of the output, so it is
    allowed."""
    banned, tokens = list(s.banned_token_ids), s.token_ids
    num_generated = len(tokens) - s.num_prompt
    for word in s.sampling.bad_word_token_ids:
        before = len(word) - 1
        if not before:
            banned.append(word[0])
        elif before <= num_generated and tokens[-1] == word[-2] and tuple(tokens[-before:]) == word[:-1]:
            banned.append(word[-1])
    return banned


def seed_of(s: ScheduledSequence) -> int:
    """Return the low 64 bits of the seed as a signed integer; for a greedy sequence the value is arbitrary.

    Raises:
        InvariantBroken: the sequence samples and has no seed.
    """
    if s.sampling.is_greedy:
        return 0
    return (drawn_seed(s) + (1 << 63)) % (1 << 64) - (1 << 63)


def drawn_seed(s: ScheduledSequence) -> int:
    """Return the seed of a sequence that is not greedy.

    Raises:
        InvariantBroken: the request has no seed.
    """
    if s.sampling.seed is None:
        raise InvariantBroken(f"request {s.request_id} has no seed; the gateway must set one")
    return s.sampling.seed


def not_finite(s: ScheduledSequence) -> GenerationFailed:
    """Return the error for a sequence with a non-finite logit; other sequences of the step are not affected."""
    return GenerationFailed(
        f"request {s.request_id}: a logit at position {s.num_computed + s.num_scheduled} is not finite;"
        " the weights or the pages are damaged"
    )


_EXCLUDING = {
    "allowed_token_ids": "allowed_token_ids",
    "bad_word_token_ids": "bad_words",
    "constraint": "constraint",
    "min_tokens": "min_tokens",
    "logit_bias": "logit_bias",
}
"""Sampling parameters that exclude tokens, and the request's field that sets each."""


def none_left(s: ScheduledSequence) -> InvalidRequest:
    """Return the error for a sequence whose sampling parameters leave no tokens to sample. It names the fields that
    the request sets."""
    fields = [name for attribute, name in _EXCLUDING.items() if getattr(s.sampling, attribute)] or ["sampling"]
    return InvalidRequest(
        f"{' and '.join(fields)} together leave no tokens to sample; allow more tokens",
        field=fields[0],
        reason=NOTHING_TO_SAMPLE,
    )


def lists_of(sequences: Sequence[ScheduledSequence], vocabulary: int) -> Lists:
    """Build the logit adjustments of a step, one row per sequence.

    Args:
        sequences: the sequences that are sampled, one per row.
        vocabulary: number of logits of a row; larger token ids are left out.
    """

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
    return dict.fromkeys(banned_now(s), 0.0)


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
