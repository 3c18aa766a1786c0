"""Logits to tokens: each row by its own request's wishes, and by nothing that shares the batch.

    logits ─ bias, bans ─ penalties ─ / temperature ─ softmax ─ top k ─ top p ─ min p ─ draw
       └─ log-probabilities are taken here, of what the model itself said

A draw takes one uniform number u of (seed, sample, position) from the counter-based generator and walks the kept
tokens, most probable first and lowest id first among equals, until their probabilities add up to more than
u * (sum of the kept). All of it in float64, row by row, so that the same logits give the same token in any batch.
Greedy takes the first of that order.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.core.philox import uniform
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.models.model import Logits
from kvferry.engine.step import ScheduledSequence
from kvferry.engine.wishes import Way, alters, drawn_seed, not_finite, way_of

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_HEAD_TOKENS = (512, 8192)
"""Most draws fall among the first few likely tokens; sorting 49,152 in full takes ten times as long."""


def sample(logits: Logits, sequences: Sequence[ScheduledSequence]) -> list[SampledToken]:
    """One token for each row.

    Args:
        logits: of R rows.
        sequences: the R sequences, in the rows' order.

    Raises:
        InvariantBroken: a logit is not a finite number.
    """
    for s, finite in zip(sequences, logits.finite, strict=True):
        if not finite:
            raise not_finite(s)
    return [
        SampledToken(logits.greedy[row]) if way_of(s) is Way.BEST else _sample_row(logits.values[row], s)
        for row, s in enumerate(sequences)
    ]


def _sample_row(row: npt.NDArray[np.float32], s: ScheduledSequence) -> SampledToken:
    raw = row.astype(np.float64)
    adjusted = adjust(raw, s) if alters(s) else raw
    if s.sampling.is_greedy:
        token = int(adjusted.argmax())
    else:
        token = draw(adjusted, s.sampling, uniform(drawn_seed(s), s.sample_index, len(s.token_ids)))
    if s.sampling.logprobs is None:
        return SampledToken(token)
    return _with_logprobs(raw, token, s.sampling.logprobs)


def adjust(logits: Floats, s: ScheduledSequence) -> Floats:
    """Logits after bias, bans and penalties, in a new array.

    Presence and frequency count generated tokens, as OpenAI defines them. Repetition divides positive and multiplies
    negative logits of every token in prompt or output (Keskar et al., CTRL, 2019).
    """
    p, out = s.sampling, logits.copy()
    known = {token: bias for token, bias in p.logit_bias.items() if token < len(out)}
    if known:
        out[list(known)] += list(known.values())
    if p.repetition_penalty != 1.0:
        seen = np.array(sorted(set(s.token_ids)), dtype=np.int64)
        out[seen] = np.where(out[seen] > 0, out[seen] / p.repetition_penalty, out[seen] * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        counts = Counter(s.token_ids[s.num_prompt :])
        if counts:
            times = np.array(list(counts.values()), dtype=np.float64)
            out[list(counts)] -= p.frequency_penalty * times + p.presence_penalty
    if s.banned_token_ids:
        out[[token for token in s.banned_token_ids if token < len(out)]] = -np.inf
    if not np.isfinite(out.max()):
        raise InvariantBroken(f"request {s.request_id}: no token is left to draw")
    return out


def draw(logits: Floats, params: SamplingParams, u: float) -> int:
    """The token that `u` falls on.

    Args:
        logits: [vocabulary]; minus infinity for tokens that must not come.
        params: temperature above zero, top k, top p, min p.
        u: in [0, 1).
    """
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to zero
        weights = np.exp((logits - logits.max()) / params.temperature)
    for count in (*_HEAD_TOKENS, len(weights)):
        head = _head(weights, max(count, params.top_k))
        ids = _by_weight(weights, head)
        token = _walk(weights[ids], weights, params, u, is_all=head is None)
        if token is not None:
            return int(ids[token])
    raise InvariantBroken("a draw walked past every token")


def _head(weights: Floats, count: int) -> Ids | None:
    """Ids of the `count` heaviest tokens and of all that equal the lightest of these; `None`: all there are."""
    if count >= len(weights):
        return None
    least = np.partition(weights, len(weights) - count)[len(weights) - count]
    return np.flatnonzero(weights >= least)


def _by_weight(weights: Floats, ids: Ids | None) -> Ids:
    """Ids from the heaviest to the lightest, lowest id first among equals; `None`: of all tokens."""
    if ids is None:
        return np.argsort(-weights, kind="stable")
    return ids[np.argsort(-weights[ids], kind="stable")]


def _walk(head: Floats, weights: Floats, params: SamplingParams, u: float, *, is_all: bool) -> int | None:
    """Index within `head` of the drawn token; `None`: the head is too short to tell.

    Args:
        head: the heaviest weights in order; all of them if `is_all`.
        weights: all of them, in order of id.
    """
    kept = head[: params.top_k] if params.top_k else head
    sums = np.cumsum(kept)
    is_cut = is_all or params.top_k > 0  # what follows `kept` is dropped, or nothing follows
    if params.top_p < 1.0 or params.min_p > 0.0:
        whole = float(sums[-1]) if is_cut else float(weights.sum())
        num_kept = len(kept)
        if params.top_p < 1.0:
            # The shortest beginning that holds top_p; rounding may leave the whole just short of it.
            num_kept = min(num_kept, int(np.searchsorted(sums, params.top_p * whole)) + 1)
            is_cut = is_cut or sums[-1] >= params.top_p * whole
        if params.min_p > 0.0:
            heavy = int(np.searchsorted(-kept, -params.min_p * kept[0], side="right"))
            is_cut = is_cut or heavy < len(kept)
            num_kept = min(num_kept, max(heavy, 1))
        if not is_cut:
            return None  # the cut lies beyond the head, so what is kept is not known
        sums = sums[:num_kept]
    target = u * (float(sums[-1]) if is_cut else float(weights.sum()))
    if target >= sums[-1]:
        # Only rounding brings u * sum up to the sum; short of everything, more tokens must be looked at.
        return len(sums) - 1 if is_cut else None
    return int(np.searchsorted(sums, target, side="right"))


def _with_logprobs(raw: Floats, token: int, num_top: int) -> SampledToken:
    highest = raw.max()
    norm = highest + np.log(np.exp(raw - highest).sum())
    head = _by_weight(raw, _head(raw, num_top)) if num_top else np.empty(0, dtype=np.int64)
    top = tuple((int(t), float(raw[t] - norm)) for t in head[:num_top])
    return SampledToken(token, float(raw[token] - norm), top)
