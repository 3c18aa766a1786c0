"""The rejection rule: a row's token has exactly the model's distribution, for any draft token."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from harness.chi_square import chi_square
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.core.philox import uniform
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.run import rejection
from kvferry.engine.execute.run.rejection import MAX_SOURCE_TOKENS, ProposedToken, drawn, verified
from kvferry.engine.execute.run.sampler import draw, probabilities
from kvferry.engine.schedule.speculation import settings as speculation_settings
from kvferry.engine.schedule.speculation.settings import parse_speculation
from kvferry.engine.schedule.step.step import DraftSource

Floats = npt.NDArray[np.float64]


def source_of(q: Floats) -> DraftSource:
    ids = np.flatnonzero(q)
    return DraftSource(ids, q[ids])


def spread(seed: int, size: int = 9) -> Floats:
    """Return a random distribution, with zeros."""
    draws = np.random.default_rng(seed).random(size) ** 3
    draws[np.random.default_rng(seed + 1).integers(size)] = 0.0
    shares: Floats = draws / draws.sum()
    return shares


# ---------------------------------------------------------------------- the rule


def outcomes(p: Floats, q: Floats | None, count: int = 6000) -> Counter[object]:
    """Draw tokens with drafts from q, or with the draft token 3."""
    counts: Counter[object] = Counter()
    for seed in range(count):
        proposed = ProposedToken(3, None)
        if q is not None:
            proposed = ProposedToken(*drawn(q, seed, 0, 5))
        counts[verified(p, proposed, seed, 0, 5)] += 1
    return counts


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("is_drawn", [True, False])
def test_tokens_have_the_distribution_of_the_model(case: int, is_drawn: bool) -> None:
    p, q = spread(10 * case), spread(10 * case + 5)
    statistic, critical = chi_square(outcomes(p, q if is_drawn else None), dict(enumerate(p.tolist())))
    assert statistic < critical


def test_the_test_detects_a_draw_from_the_whole_distribution_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = spread(0), spread(5)
    monkeypatch.setattr(rejection, "_remaining", lambda p, token, source: p)
    statistic, critical = chi_square(outcomes(p, q), dict(enumerate(p.tolist())))
    assert statistic > 2.0 * critical


@pytest.mark.parametrize("case", range(4))
def test_as_many_drafts_are_accepted_as_the_distributions_have_in_common(case: int) -> None:
    p, q = spread(10 * case), spread(10 * case + 5)
    drafts = [drawn(q, seed, 0, 5) for seed in range(6000)]
    accepted = sum(verified(p, ProposedToken(*draft), seed, 0, 5) == draft[0] for seed, draft in enumerate(drafts))
    assert accepted / 6000 == pytest.approx(float(np.minimum(p, q).sum()), abs=0.025)


@given(st.integers(0, 10_000), st.integers(0, 2**64 - 1), st.booleans())
def test_a_rejected_token_is_never_drawn_again(case: int, seed: int, is_drawn: bool) -> None:
    p, q = spread(case), spread(case + 7)
    token, source = drawn(q, seed, 1, 3) if is_drawn else (case % 9, None)
    found = verified(p, ProposedToken(token, source), seed, 1, 3)
    assert p[found] > 0.0
    share = 1.0 if source is None else q[token]
    is_accepted = uniform(seed, 1, 3, 2) * share < p[token]
    assert (found == token) == is_accepted


def test_equal_distributions_accept_everything() -> None:
    p = spread(3)
    assert all(verified(p, ProposedToken(*(d := drawn(p, seed, 0, 1))), seed, 0, 1) == d[0] for seed in range(500))


def test_a_draft_token_without_probability_is_refused() -> None:
    p = np.array([0.5, 0.5, 0.0])
    for seed in range(50):
        assert verified(p, ProposedToken(2, None), seed, 0, 0) != 2
        assert verified(p, ProposedToken(1, source_of(np.array([1.0, 0.0, 0.0]))), seed, 0, 0) in (0, 1)
    # Where rounding leaves no remainder, the token comes from the whole distribution.
    assert verified(np.array([0.0, 1.0]), ProposedToken(0, source_of(np.array([0.0, 1.0]))), 1, 0, 0) == 1


def test_the_distribution_of_a_draft_is_bounded_and_normalized() -> None:
    p = np.random.default_rng(1).random(5000)
    token, source = drawn(p / p.sum(), 1, 0, 0)
    assert len(source.ids) == MAX_SOURCE_TOKENS
    assert (np.diff(source.ids) > 0).all()
    assert token in source.ids
    assert source.probabilities.sum() == pytest.approx(1.0)
    assert p[source.ids].min() >= np.sort(p)[-MAX_SOURCE_TOKENS]


@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.7}, {"top_k": 30, "top_p": 0.9}]
)
@pytest.mark.parametrize("size", [40, 1500])
def test_probabilities_are_those_of_a_draw(cuts: dict[str, float], size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 3, size)
    params = SamplingParams(temperature=0.9, seed=1, **cuts)  # type: ignore[arg-type]
    shares = probabilities(logits, params)
    assert shares.sum() == pytest.approx(1.0)
    found = Counter(draw(logits, params, (i + 0.5) / 2000) for i in range(2000))
    for token, share in enumerate(shares.tolist()):
        assert found.get(token, 0) / 2000 == pytest.approx(share, abs=1.01 / 2000), token


# ---------------------------------------------------------------------- the setting


@pytest.mark.parametrize("method", [name for name in speculation_settings._DEFAULTS if name != "off"])
def test_a_pool_takes_every_parameter_of_a_method(method: str) -> None:
    chart = Path(__file__).parents[5] / "charts/kvferry/files/crds/inferencepools.kvferry.dev.yaml"
    found = re.search(r"^ +speculation:\n.*?^ +pattern: '(.*?)'$", chart.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    model = "=a/b" if method in speculation_settings.MODEL_METHODS else ""
    defaults = speculation_settings._DEFAULTS[method]
    every = "&".join((*(f"{name}={value}" for name, value in defaults.items()), "accept=rejection"))
    for query, is_valid in (("", True), (f"?{every}", True), (f"?{every}&nothing=1", False), ("?accept=no", False)):
        assert (re.match(found[1], f"{method}{model}{query}") is not None) == is_valid, query
        assert is_accepted(f"{method}{model}{query}") == is_valid, query


def is_accepted(text: str) -> bool:
    try:
        parse_speculation(text)
    except UsageError:
        return False
    return True
