"""Draws follow their definition, and depend only on the request's own logits, parameters and position."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import GenerationFailed, InvalidRequest, InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.philox import uniform
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.execute.models.transformer import logits_of
from kvferry.engine.execute.run.sampler import adjust, draw, sample
from kvferry.engine.schedule.step.step import ScheduledSequence
from kvferry.engine.schedule.step.token_mask import Bits, TokenMask

GREEDY = SamplingParams(temperature=0)
Floats = npt.NDArray[np.float64]


def sequence(
    params: SamplingParams,
    tokens: list[int] | None = None,
    *,
    num_prompt: int = 1,
    banned: tuple[int, ...] = (),
    mask: TokenMask | None = None,
) -> ScheduledSequence:
    tokens = tokens or [0]
    return ScheduledSequence(
        request_id=RequestId("r"),
        token_ids=tokens,
        num_prompt=num_prompt,
        num_computed=len(tokens) - 1,
        num_scheduled=1,
        block_ids=[],
        num_sampled=1,
        sampling=params,
        sample_index=0,
        banned_token_ids=banned,
        mask=mask,
    )


def definition(logits: Floats, p: SamplingParams, u: float) -> int:
    """Return the token by the definition: sort all tokens, apply the cuts, walk to the target."""
    weights = np.exp((logits - logits.max()) / p.temperature)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[: p.top_k] if p.top_k else order
    total = math.fsum(weights[i] for i in kept)
    if p.top_p < 1:
        mass = np.cumsum([weights[i] for i in kept])
        kept = kept[: int((mass < p.top_p * total).sum()) + 1]
    kept = [i for i in kept if weights[i] >= p.min_p * weights[order[0]]]
    if p.typical_p < 1:
        kept = typical(kept, weights, p.typical_p)
    target, reached = u * math.fsum(weights[i] for i in kept), 0.0
    for i in kept:
        reached += weights[i]
        if reached > target:
            return i
    return kept[-1]


def typical(kept: list[int], weights: Floats, mass: float) -> list[int]:
    """Return the locally typical tokens among `kept`, in the order of `kept`."""
    positive = [i for i in kept if weights[i] > 0]
    total = weights[positive].sum()
    information = {i: -np.log(weights[i] / total) for i in positive}
    entropy = sum(weights[i] / total * information[i] for i in positive)
    taken, reached = set(), 0.0
    for i in sorted(positive, key=lambda i: abs(information[i] - entropy)):
        if reached >= mass:
            break
        taken.add(i)
        reached += weights[i] / total
    return [i for i in positive if i in taken]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1, 2, 7, 600, 3000, 9000]),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
    levels=st.sampled_from([0, 3]),
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 700]),
    top_p=st.sampled_from([0.05, 0.5, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
)
def test_a_draw_equals_the_definition(
    seed: int,
    size: int,
    spread: float,
    levels: int,
    u: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
) -> None:
    logits = np.random.default_rng(seed).standard_normal(size) * spread
    if levels:  # many equal logits
        logits = np.round(logits * levels) / levels
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    drawn, expected = draw(logits, params, u), definition(logits, params, u)
    if drawn != expected:
        # The sums have another order, so a target within rounding error of a boundary may fall to either side.
        nudged = {definition(logits, params, min(max(u + d, 0), 1 - 2**-53)) for d in (-1e-12, 1e-12)}
        near = {definition(logits, replace(params, top_p=min(1.0, top_p * (1 + d))), u) for d in (-1e-12, 1e-12)}
        assert drawn in nudged | near or (typical_p < 1 and is_near_tie(logits, params))


def is_near_tie(logits: Floats, p: SamplingParams) -> bool:
    """Return whether rounding may decide: two tokens are almost equally typical, or a sum almost equals the mass."""
    weights = np.exp((logits - logits.max()) / p.temperature)
    shares = weights[weights > 0] / weights.sum()
    information = -np.log(shares)
    distance = np.abs(information - (shares * information).sum())
    order = np.argsort(distance, kind="stable")
    gaps, sums = np.diff(distance[order]), np.cumsum(shares[order])
    return bool((gaps < 1e-9).any()) or bool((np.abs(sums - p.typical_p) < 1e-9).any()) or p.top_p < 1


def frequencies(logits: Floats, params: SamplingParams, num_draws: int = 4000) -> Floats:
    counts = np.zeros(len(logits))
    for position in range(num_draws):
        counts[draw(logits, params, uniform(7, 0, position))] += 1
    return counts


def chi_square(counts: Floats, expected: Floats) -> float:
    drawn = expected > 0
    assert not counts[~drawn].any(), "a token of probability 0 was drawn"
    wanted = counts.sum() * expected[drawn] / expected.sum()
    return float(((counts[drawn] - wanted) ** 2 / wanted).sum())


def test_typical_draws_follow_the_distribution_over_the_typical_tokens() -> None:
    # The entropy is 1.067 nats; the tokens have 0.799, 1.204 and 1.386, so that the order is 0.3, 0.45, 0.25.
    shares = np.array([0.45, 0.3, 0.0, 0.25])
    logits = np.log(np.maximum(shares, 1e-300))
    near = np.array([0.45, 0.3, 0.0, 0.0])
    assert frequencies(logits, SamplingParams(typical_p=0.29), 200).tolist() == [0, 200, 0, 0]
    assert (
        chi_square(frequencies(logits, SamplingParams(typical_p=0.5)), near) < 10.8
    )  # p = 0.001, one degree of freedom
    assert chi_square(frequencies(logits, SamplingParams(typical_p=0.8)), shares) < 13.8  # two degrees of freedom
    assert chi_square(frequencies(logits, SamplingParams()), shares) < 13.8


def test_typical_sampling_drops_the_most_likely_token_where_its_information_is_far_from_the_entropy() -> None:
    # The entropy is 2.164 nats. The token of probability 0.4 has 0.916 nats; the others have 2.996, which is nearer.
    logits = np.log(np.array([0.4, *[0.05] * 12]))
    counts = frequencies(logits, SamplingParams(typical_p=0.48))
    assert chi_square(counts, np.array([0.0, *[0.05] * 10, 0.0, 0.0])) < 27.9  # p = 0.001, nine degrees
    assert frequencies(logits, SamplingParams(), 500)[0] > 150


def test_typical_sampling_applies_after_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    both = SamplingParams(top_k=2, typical_p=0.5)
    # The entropy of (4/7, 3/7) is 0.683 nats. 4/7 is nearer (0.560 against 0.847) and reaches the mass alone.
    assert frequencies(logits, both, 200).tolist() == [200, 0, 0, 0]


def test_only_allowed_tokens_are_drawn_in_the_proportions_of_the_others_absence() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.1]]))
    counts = np.zeros(4)
    for seed in range(2000):
        params = SamplingParams(seed=seed, allowed_token_ids=(1, 3, 3, 10**6))
        counts[sample(logits_of(logits), [sequence(params)])[0].token_id] += 1
    assert chi_square(counts, np.array([0.0, 0.2, 0.0, 0.1])) < 10.8
    assert sample(logits_of(logits), [sequence(replace(GREEDY, allowed_token_ids=(3, 2)))])[0].token_id == 2
    (failed,) = sample(logits_of(logits), [sequence(replace(GREEDY, allowed_token_ids=(3,)), banned=(3,))])
    assert isinstance(failed, InvalidRequest)
    assert "allowed_token_ids" in failed.message


def test_the_last_token_of_a_bad_word_is_banned_after_the_other_ones() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0]])
    params = replace(GREEDY, bad_word_token_ids=((7, 8, 1), (2,)))

    def drawn(tokens: list[int], num_prompt: int) -> int:
        return sample(logits_of(logits), [sequence(params, tokens, num_prompt=num_prompt)])[0].token_id

    assert drawn([7, 7, 8], 1) == 3, "the best two tokens would complete both words"
    assert drawn([7, 8, 8], 1) == 1
    assert drawn([7, 8], 1) == 1, "a bad word does not match a beginning in the prompt"
    assert drawn([7, 8], 0) == 3
    free = sample(logits_of(logits), [sequence(replace(params, bad_word_token_ids=((7, 8, 1),)), [9], num_prompt=1)])
    assert free[0].token_id == 1


@pytest.mark.parametrize("num_top", [1, 20])
def test_log_probabilities_are_exact_for_large_logits_and_many_alternatives(num_top: int) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 50 + 3e4
    (token,) = sample(logits_of(logits), [sequence(replace(GREEDY, logprobs=num_top))])
    expected = torch.log_softmax(logits[0].double(), 0)
    ids = expected.sort(descending=True, stable=True).indices[:num_top].tolist()
    assert [t for t, _ in token.top] == ids
    assert [value for _, value in token.top] == pytest.approx(expected[ids].tolist(), abs=1e-9)


def test_frequencies_are_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    counts = np.zeros(4)
    for position in range(4000):
        counts[draw(logits, SamplingParams(), uniform(7, 0, position))] += 1
    chi_square = float((((counts - 4000 * np.exp(logits)) ** 2) / (4000 * np.exp(logits))).sum())
    assert chi_square < 16.3  # p = 0.001 at three degrees of freedom


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [49_000, 7, 33_333]] = 2.5
    tokens = sample(logits_of(logits), [sequence(GREEDY), sequence(GREEDY)])
    assert [t.token_id for t in tokens] == [7, 0]
    with_logprobs = sample(logits_of(logits), [sequence(replace(GREEDY, logprobs=2))] * 2)
    assert [t.token_id for t in with_logprobs] == [7, 0]


def test_batch_mates_change_nothing() -> None:
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(3)) * 2
    sequences = [
        sequence(SamplingParams(seed=row, temperature=0.5 * (row % 3), top_p=0.9), [1] * (row + 1)) for row in range(8)
    ]
    together = [t.token_id for t in sample(logits_of(logits), sequences)]
    alone = [sample(logits_of(logits[row : row + 1]), [sequences[row]])[0].token_id for row in range(8)]
    assert together == alone


def test_the_stream_is_seed_sample_and_position() -> None:
    logits = torch.zeros(1, 1000)
    expected = int(uniform(5, 0, 3) * 1000)
    assert sample(logits_of(logits), [sequence(SamplingParams(seed=5), [9, 9, 9])])[0].token_id == expected
    other = replace(sequence(SamplingParams(seed=5), [9, 9, 9]), sample_index=1)
    assert sample(logits_of(logits), [other])[0].token_id == int(uniform(5, 1, 3) * 1000)


def test_penalties_and_bias_by_hand() -> None:
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={4: 3.0, 10**6: 1.0}
    )
    logits = np.array([1.0, -1.0, 2.0, 0.5, 0.0])
    # Prompt 0, 1; generated 1, 2, 2.
    out = adjust(logits, sequence(params, [0, 1, 1, 2, 2], num_prompt=2, banned=(3,)))
    assert out.tolist() == [0.5, -2.0 - 0.75, 1.0 - 1.0, -math.inf, 3.0]
    assert logits.tolist() == [1.0, -1.0, 2.0, 0.5, 0.0]


def test_banned_tokens_are_not_drawn_even_greedily() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0]])
    assert sample(logits_of(logits), [sequence(GREEDY, banned=(1,))])[0].token_id == 2
    drawn = {
        sample(logits_of(logits), [sequence(SamplingParams(seed=s, temperature=9), banned=(1, 2))])[0].token_id
        for s in range(20)
    }
    assert drawn == {0}


def test_a_row_without_a_token_to_sample_fails_alone() -> None:
    failed, other = sample(logits_of(torch.zeros(2, 2)), [sequence(GREEDY, banned=(0, 1)), sequence(GREEDY)])
    assert isinstance(failed, InvalidRequest)
    assert failed.reason == "NO_TOKEN_LEFT"
    assert other == SampledToken(0)


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0]])
    params = SamplingParams(seed=1, temperature=0.01, logit_bias={0: 100.0}, logprobs=3)
    (token,) = sample(logits_of(logits), [sequence(params)])
    expected = torch.log_softmax(logits[0].double(), 0)
    assert token.token_id == 0
    assert token.logprob == pytest.approx(float(expected[0]))
    assert [t for t, _ in token.top] == [2, 1, 3]
    assert [value for _, value in token.top] == pytest.approx([float(expected[t]) for t in (2, 1, 3)])
    (bare,) = sample(logits_of(logits), [sequence(replace(params, logprobs=0))])
    assert bare.top == ()
    assert bare.logprob == token.logprob


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, logprobs=2), SamplingParams(seed=1, top_k=3)])
def test_a_row_with_a_logit_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 4] = bad
    fine, failed = sample(logits_of(logits), [sequence(params), sequence(params)])
    assert isinstance(fine, SampledToken)
    assert isinstance(failed, GenerationFailed)
    assert "is not finite" in failed.message


def test_a_random_request_without_a_seed_breaks_an_invariant() -> None:
    with pytest.raises(InvariantBroken, match="has no seed"):
        sample(logits_of(torch.zeros(1, 4)), [sequence(SamplingParams())])


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 100.0])
def test_extreme_temperatures_give_valid_draws(temperature: float) -> None:
    logits = np.array([3.0, 3.0, -1e4])
    assert draw(logits, SamplingParams(temperature=temperature), 0.1) == 0
    assert draw(logits, SamplingParams(temperature=temperature), 0.99) in (1, 2)


class Mask:
    """A mask that allows some tokens, is late, or fails."""

    is_ready = True

    def __init__(self, allowed: set[int] | None, error: InvalidRequest | None = None) -> None:
        self.allowed = allowed
        self.error = error

    def wait(self) -> Bits | None:
        if self.error is not None:
            raise self.error
        return (
            None if self.allowed is None else np.packbits(np.isin(np.arange(8), list(self.allowed)), bitorder="little")
        )

    def after(self, token_ids: object) -> TokenMask:
        raise AssertionError("only the scheduler advances masks")


MASKED_LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0, 5.0, 4.0, 0.5]])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (GREEDY, 3),
        (SamplingParams(temperature=0, logit_bias={2: 10.0, 5: 50.0}), 2),
        (SamplingParams(temperature=0, logprobs=0), 3),
    ],
)
def test_a_masked_row_takes_the_best_token_that_is_allowed(params: SamplingParams, expected: int) -> None:
    (sampled,) = sample(logits_of(MASKED_LOGITS), [sequence(params, mask=Mask({2, 3, 4}))])
    assert isinstance(sampled, SampledToken)
    assert sampled.token_id == expected
    if params.logprobs is not None:
        norm = float(torch.logsumexp(MASKED_LOGITS[0], 0))
        assert sampled.logprob == pytest.approx(2.0 - norm), "log-probabilities are the model's, before the mask"


def test_masked_draws_follow_the_distribution_of_the_allowed_tokens() -> None:
    allowed, count = [2, 3, 4], 3000
    rows = [sequence(SamplingParams(seed=seed), mask=Mask(set(allowed))) for seed in range(count)]
    sampled = sample(logits_of(MASKED_LOGITS.expand(count, -1)), rows)
    tokens = [token.token_id for token in sampled if isinstance(token, SampledToken)]
    weights = np.exp(MASKED_LOGITS[0, allowed].double().numpy())
    expected = count * weights / weights.sum()
    seen = np.array([tokens.count(token) for token in allowed])
    assert seen.sum() == count
    assert float(((seen - expected) ** 2 / expected).sum()) < 13.8, "chi-square, two degrees of freedom, 0.1 %"


def test_a_mask_takes_precedence_over_bans_that_leave_no_token() -> None:
    # min_tokens bans the end tokens, but at the end of a grammar no other token is allowed.
    (sampled,) = sample(logits_of(MASKED_LOGITS), [sequence(GREEDY, banned=(4,), mask=Mask({4}))])
    assert sampled == SampledToken(4)


def test_a_late_mask_samples_nothing_and_an_error_is_that_of_the_row() -> None:
    error = InvalidRequest("too complex", field="constraint")
    rows = [sequence(GREEDY, mask=Mask(None)), sequence(GREEDY, mask=Mask(None, error)), sequence(GREEDY)]
    assert sample(logits_of(MASKED_LOGITS.expand(3, -1)), rows) == [None, error, SampledToken(5)]
