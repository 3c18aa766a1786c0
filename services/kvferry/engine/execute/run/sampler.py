"""The host's sampler: samples each row with its request's parameters, independently of the batch.

    logits ─ mask ─ bias ─ penalties ─ bans ─ / temperature ─ softmax ─ top k ─ top p ─ min p ─ typical p ─ draw
       └─ log-probabilities are taken here, from the unmodified logits

Bans come from `min_tokens`, `bad_words` and `allowed_token_ids`. `typical_p` refers to the distribution over the tokens
that top-k, top-p and min-p filtering keep.

A draw takes one uniform number u from the counter-based generator, keyed by (seed, sample, position), and walks the
kept tokens, most probable first and lowest id first on ties, until the sum of their probabilities exceeds u times the
sum over all kept tokens. All computations are in float64, row by row, so that the same logits give the same token in
any batch. Greedy sampling takes the first token of that order. `rejection` replaces the draw for a draft token's row if
the plan uses the rejection rule.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvalidRequest, InvariantBroken, KvferryError
from kvferry.core.philox import uniform
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.execute.models.model import Logits
from kvferry.engine.execute.run.rejection import ProposedToken, verified
from kvferry.engine.schedule.step.draft_tree import next_row
from kvferry.engine.schedule.step.sampling_plan import (
    SamplingPath,
    alters,
    banned_now,
    drawn_seed,
    none_left,
    not_finite,
    sampling_path,
)
from kvferry.engine.schedule.step.step import Sampled, ScheduledSequence, draft_tokens, rows_of
from kvferry.engine.schedule.step.token_mask import Bits, TokenMask, has_token, unpacked

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_HEAD_TOKENS = (512, 8192)
"""Numbers of most likely tokens that a draw sorts first. Most draws select one of these tokens; sorting a whole
vocabulary of 49,152 tokens takes ten times as long."""


def sample(logits: Logits, scheduled: Sequence[ScheduledSequence]) -> list[Sampled]:
    """Sample one token for each sampled row. The result is an error for a row with a non-finite logit or with no tokens
    to sample, and `None` for a row whose mask is not ready; other rows are not affected. Rows after a row that differs
    from its draft token do not count (`StepResult.of`) and are not sampled.

    Args:
        logits: logits of R rows.
        scheduled: sequences with R sampled rows in total, in the order of rows.

    Raises:
        InvariantBroken: a sequence that samples has no seed.
    """
    sampled: list[Sampled] = []
    for s in scheduled:
        if s.num_sampled == 1:
            sampled.append(_sample_one(logits, len(sampled), s))
        elif s.num_sampled:
            sampled += _sample_drafted(logits, len(sampled), s)
    return sampled


def _sample_drafted(logits: Logits, first: int, s: ScheduledSequence) -> list[Sampled]:
    """Sample the rows of a sequence with draft tokens, up to the first that differs from its draft token."""
    if sampling_path(s) is SamplingPath.BEST:  # does not depend on earlier tokens
        return [_sample_one(logits, row, s) for row in range(first, first + s.num_sampled)]
    if s.parents:
        return _sample_path(logits, first, s)
    sampled: list[Sampled] = []
    sources = (*(s.draft_sources or (None,) * s.num_drafts), None)
    for draft, source, row in zip([*draft_tokens(s), None], sources, rows_of(s), strict=True):
        proposed = None if s.draft_sources is None or draft is None else ProposedToken(draft, source)
        one = _sample_one(logits, first + len(sampled), row, proposed)
        sampled.append(one)
        if not isinstance(one, SampledToken) or one.token_id != draft:
            break
    return sampled + [None] * (s.num_sampled - len(sampled))


def _sample_path(logits: Logits, first: int, s: ScheduledSequence) -> list[Sampled]:
    """Sample the rows of a tree on the path of the sampled tokens."""
    drafts, rows = draft_tokens(s), list(rows_of(s))
    sampled: list[Sampled] = [None] * s.num_sampled
    row: int | None = 0
    while row is not None:
        one = sampled[row] = _sample_one(logits, first + row, rows[row])
        row = next_row(s.parents, drafts, row, one.token_id) if isinstance(one, SampledToken) else None
    return sampled


def _sample_one(logits: Logits, row: int, s: ScheduledSequence, proposed: ProposedToken | None = None) -> Sampled:
    if not logits.finite[row]:
        return not_finite(s)
    if sampling_path(s) is SamplingPath.BEST:
        return SampledToken(logits.greedy[row])
    if s.mask is not None:
        return _sample_masked(logits, row, s, s.mask)
    return _sample_row(logits.values[row], s, proposed=proposed)


def is_greedy(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Return whether `sample` needs only the argmax of each row."""
    return all(not s.num_sampled or sampling_path(s) is SamplingPath.BEST for s in scheduled)


def _sample_masked(logits: Logits, row: int, s: ScheduledSequence, mask: TokenMask) -> Sampled:
    """Sample a token that the constraint allows. If bans leave none of the allowed tokens, as `min_tokens` may at the
    end of a grammar, the constraint takes precedence and the bans are dropped."""
    try:
        allowed = mask.wait()
    except KvferryError as error:
        return error
    if allowed is None:
        return None
    if s.sampling.is_greedy and not alters(s) and s.sampling.logprobs is None:
        best = logits.greedy[row]
        return SampledToken(best if has_token(allowed, best) else _best_of(logits.values[row], allowed))
    values = logits.values[row]
    tokens = unpacked(allowed, len(values))
    sampled = _sample_row(values, s, tokens)
    if isinstance(sampled, InvalidRequest) and s.banned_token_ids:
        return _sample_row(values, replace(s, banned_token_ids=()), tokens)
    return sampled


def _best_of(row: npt.NDArray[np.float32], allowed: Bits) -> int:
    """Return the allowed token with the largest logit. Most masks allow only a few tokens."""
    ids = np.flatnonzero(unpacked(allowed, len(row)))
    return int(ids[row[ids].argmax()])


def _sample_row(
    row: npt.NDArray[np.float32],
    s: ScheduledSequence,
    allowed: npt.NDArray[np.bool_] | None = None,
    proposed: ProposedToken | None = None,
) -> Sampled:
    raw = row.astype(np.float64)
    masked = raw if allowed is None else np.where(allowed, raw, -np.inf)
    try:
        adjusted = adjust(masked, s) if alters(s) else masked
    except InvalidRequest as error:
        return error
    if s.sampling.is_greedy:
        token = int(adjusted.argmax())
    elif proposed is not None:
        position = len(s.token_ids)
        token = verified(probabilities(adjusted, s.sampling), proposed, drawn_seed(s), s.sample_index, position)
    else:
        token = draw(adjusted, s.sampling, uniform(drawn_seed(s), s.sample_index, len(s.token_ids)))
    if s.sampling.logprobs is None:
        return SampledToken(token)
    return _with_logprobs(raw, token, s.sampling.logprobs)


def adjust(logits: Floats, s: ScheduledSequence) -> Floats:
    """Apply bias, penalties and bans to one row of logits; return a new array.

    Presence and frequency count generated tokens, as OpenAI defines them. Repetition divides positive and multiplies
    negative logits of every token in prompt or output (Keskar et al., CTRL, 2019).

    Args:
        logits: [vocabulary] float64; not modified.
        s: the sequence whose next token is sampled.

    Raises:
        InvalidRequest: every token is banned.
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
    banned = banned_now(s)
    if banned:
        out[[token for token in banned if token < len(out)]] = -np.inf
    if p.allowed_token_ids:
        allowed = [token for token in p.allowed_token_ids if token < len(out)]
        values, out = out[allowed], np.full_like(out, -np.inf)
        out[allowed] = values
    if not np.isfinite(out.max()):
        raise none_left(s)
    return out


def draw(logits: Floats, params: SamplingParams, u: float) -> int:
    """Return the token id selected by the random number `u`.

    Args:
        logits: [vocabulary] float64; minus infinity for banned tokens.
        params: parameters of the draw; the temperature must be above 0.
        u: random number in [0, 1).

    Raises:
        InvariantBroken: no token was selected.
    """
    with np.errstate(over="ignore", under="ignore"):  # with a tiny temperature all weights except the largest underflow
        weights = np.exp((logits - logits.max()) / params.temperature)
    for count in (*_HEAD_TOKENS, len(weights)):
        head = _head(weights, max(count, params.top_k))
        ids = _by_weight(weights, head)
        token = _walk(weights[ids], weights, params, u, is_all=head is None)
        if token is not None:
            return int(ids[token])
    raise InvariantBroken("a draw selected no token")


def probabilities(logits: Floats, params: SamplingParams) -> Floats:
    """Return the distribution from which `draw` selects a token, [vocabulary] float64.

    Args:
        logits: [vocabulary] float64; minus infinity for banned tokens.
        params: parameters of the draw; the temperature must be above 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        weights: Floats = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0:
        kept = _kept(weights, params)
        weights, chosen = np.zeros_like(weights), weights[kept]
        weights[kept] = chosen
    shares: Floats = weights / weights.sum()
    return shares


def _kept(weights: Floats, params: SamplingParams) -> Ids:
    """Return the ids of the tokens that top-k, top-p, min-p and typical-p filtering keep."""
    for count in (*_HEAD_TOKENS, len(weights)):
        head = _head(weights, max(count, params.top_k))
        ids = _by_weight(weights, head)
        num_kept = _num_kept(weights[ids], weights, params, is_all=head is None)
        if num_kept is not None:
            ids = ids[:num_kept]
            return ids[_typical(weights[ids], params.typical_p)] if params.typical_p < 1.0 else ids
    raise InvariantBroken("top-k/top-p/min-p filtering left no tokens")


def _head(weights: Floats, count: int) -> Ids | None:
    """Return the ids of the `count` tokens with the largest weights and of all tokens that tie with the last of them;
    `None` if these are all tokens."""
    if count >= len(weights):
        return None
    smallest_kept = np.partition(weights, len(weights) - count)[len(weights) - count]
    return np.flatnonzero(weights >= smallest_kept)


def _by_weight(weights: Floats, ids: Ids | None) -> Ids:
    """Sort ids by descending weight, lowest id first on ties; `None` sorts all tokens."""
    if ids is None:
        return np.argsort(-weights, kind="stable")
    return ids[np.argsort(-weights[ids], kind="stable")]


def _walk(head: Floats, weights: Floats, params: SamplingParams, u: float, *, is_all: bool) -> int | None:
    """Return the index in `head` of the selected token; `None` if the head is too short.

    Args:
        head: the largest weights in descending order; all weights if `is_all`.
        weights: all weights, in order of id.
        params: parameters of the draw.
        u: random number in [0, 1).
        is_all: whether `head` has all weights.
    """
    num_kept = _num_kept(head, weights, params, is_all=is_all)
    if num_kept is not None and params.typical_p < 1.0:
        typical = _typical(head[:num_kept], params.typical_p)
        return int(typical[_select(head[typical], u)])
    if num_kept is not None:
        return _select(head[:num_kept], u)
    if params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0:
        return None  # the boundary is beyond the head, so the kept tokens are unknown
    sums = np.cumsum(head)
    target = u * float(weights.sum())
    return None if target >= sums[-1] else int(np.searchsorted(sums, target, side="right"))


def _num_kept(head: Floats, weights: Floats, params: SamplingParams, *, is_all: bool) -> int | None:
    """Return the number of leading tokens of the head that top k, top p and min p keep; `None` if they may keep tokens
    beyond the head."""
    kept = head[: params.top_k] if params.top_k else head
    is_cut = is_all or params.top_k > 0  # no token after `kept` can be selected
    num_kept = len(kept)
    if params.top_p < 1.0:
        sums = np.cumsum(kept)
        whole = float(sums[-1]) if is_cut else float(weights.sum())
        # Shortest prefix with total probability top_p; due to rounding, the sum of all may be slightly below top_p.
        num_kept = min(num_kept, int(np.searchsorted(sums, params.top_p * whole)) + 1)
        is_cut = is_cut or sums[-1] >= params.top_p * whole
    if params.min_p > 0.0:
        heavy = int(np.searchsorted(-kept, -params.min_p * kept[0], side="right"))
        is_cut = is_cut or heavy < len(kept)
        num_kept = min(num_kept, max(heavy, 1))
    return num_kept if is_cut else None


def _select(weights: Floats, u: float) -> int:
    """Return the first index up to which the weights sum to more than `u` times the sum of all."""
    sums = np.cumsum(weights)
    # Only rounding can make `u * sum` reach the sum. A banned token has weight 0 and must not be selected.
    return min(int(np.searchsorted(sums, u * float(sums[-1]), side="right")), int(np.count_nonzero(weights)) - 1)


def _typical(weights: Floats, mass: float) -> Ids:
    """Return the indices of the locally typical tokens, ascending (Meister et al., Locally Typical Sampling, 2023,
    section 4): the smallest set of tokens with probability `mass` whose information content is closest to the entropy.

    Args:
        weights: weights of the kept tokens in descending order. Among equally close tokens, the first ones are taken.
        mass: probability of the result, above 0 and below 1.
    """
    weights = weights[: np.count_nonzero(weights)]  # the others cannot be drawn, and their information is infinite
    shares = weights / weights.sum()
    information = -np.log(shares)
    entropy = float((shares * information).sum())
    order = np.argsort(np.abs(information - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(shares[order]), mass)) + 1
    return np.sort(order[:count])


def _with_logprobs(raw: Floats, token: int, num_top: int) -> SampledToken:
    norm = log_norm(raw)
    top = tuple((int(t), float(raw[t] - norm)) for t in most_likely(raw, num_top))
    return SampledToken(token, float(raw[token] - norm), top)


def log_norm(raw: Floats) -> float:
    """Return the logarithm of the sum of the exponentials of a row of logits.

    Args:
        raw: logits, [vocabulary] float64, at least one of them finite.
    """
    highest = raw.max()
    return float(highest + np.log(np.exp(raw - highest).sum()))


def most_likely(raw: Floats, count: int) -> Ids:
    """Return the ids of the `count` largest logits in descending order, lowest id first on ties.

    Args:
        raw: logits, [vocabulary] float64.
        count: number of ids.
    """
    return _by_weight(raw, _head(raw, count))[:count] if count else np.empty(0, dtype=np.int64)
