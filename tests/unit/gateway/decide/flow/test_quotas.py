"""Quotas: token buckets for requests and tokens, concurrent requests, corrections, and retry times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import Forbidden, UnknownModel
from kvferry.gateway.decide.flow.capacity import MAX_RETRY_SECONDS, DrainRate
from kvferry.gateway.decide.flow.controller import QueueBounds
from kvferry.gateway.decide.flow.quotas import QuotaExceeded, Quotas
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy


def accept(quotas: Quotas, policy: TenantPolicy, tokens: float, now: float) -> bool:
    try:
        quotas.check("t", policy, tokens, now)
    except QuotaExceeded:
        return False
    quotas.begin("t", tokens)
    return True


def test_requests_are_limited_by_the_minute_and_by_the_burst():
    quotas, policy = Quotas(), TenantPolicy(requests_per_minute=60, request_burst=2)
    assert [accept(quotas, policy, 1, 0.0) for _ in range(3)] == [True, True, False]
    with pytest.raises(QuotaExceeded, match="tenant 't' has used up its quota requests_per_minute = 60") as over:
        quotas.check("t", policy, 1, 0.0)
    assert (over.value.quota, over.value.http_status, over.value.reason) == (
        "requests_per_minute",
        429,
        "RATE_LIMIT_EXCEEDED",
    )
    assert over.value.retry_after_seconds == 1.0
    assert accept(quotas, policy, 1, 1.0), "after the retry time of the refusal"
    assert not accept(quotas, policy, 1, 1.5)


def test_tokens_are_corrected_when_the_request_ends():
    quotas, policy = Quotas(), TenantPolicy(tokens_per_minute=600)
    assert accept(quotas, policy, 500, 0.0)
    assert not accept(quotas, policy, 200, 0.0)
    quotas.end("t", expected=500, used=100)
    assert accept(quotas, policy, 200, 0.0)
    quotas.end("t", expected=200, used=700)
    with pytest.raises(QuotaExceeded, match="tokens_per_minute = 600") as over:
        quotas.check("t", policy, 1, 0.0)
    assert over.value.retry_after_seconds == pytest.approx(201 / 10), (
        "the bucket is 200 tokens below zero and gains 10 per second"
    )


def test_a_request_above_the_burst_needs_a_full_bucket_instead_of_being_refused_for_ever():
    quotas, policy = Quotas(), TenantPolicy(tokens_per_minute=600, token_burst=100)
    assert accept(quotas, policy, 1000, 0.0)
    assert not accept(quotas, policy, 1000, 99.0)
    assert accept(quotas, policy, 1000, 101.0)


def test_concurrent_requests_are_limited_and_released_at_their_end():
    quotas, policy = Quotas(), TenantPolicy(concurrent_requests=2)
    assert [accept(quotas, policy, 5, 0.0) for _ in range(3)] == [True, True, False]
    with pytest.raises(QuotaExceeded) as over:
        quotas.check("t", policy, 5, 0.0)
    assert over.value.quota == "concurrent_requests"
    quotas.end("t", 5, 5)
    assert accept(quotas, policy, 5, 0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), max_size=60))
def test_no_tenant_gets_more_than_its_rate_and_its_burst(arrivals):
    quotas, policy, now, accepted, requests = Quotas(), TenantPolicy(60, (0, 0), 120, 3, 6000, 500), 0.0, 0.0, 0
    for pause, tokens in arrivals:
        now += pause
        if accept(quotas, policy, tokens, now):
            accepted += tokens
            requests += 1
    assert accepted <= 500 + 100 * now + 1e-6
    assert requests <= 3 + 2 * now + 1e-6


def test_counted_requests_share_the_quota_of_requests():
    quotas, policy = Quotas(), TenantPolicy(requests_per_minute=1)
    quotas.count("t", policy, 0.0)
    with pytest.raises(QuotaExceeded):
        quotas.count("t", policy, 0.0)
    assert not accept(quotas, policy, 1, 0.0)


def test_the_expected_output_follows_past_outputs():
    quotas = Quotas()
    assert quotas.expected_output("t", 100) == 100
    assert quotas.expected_output("t", 10_000) == 256
    for _ in range(100):
        quotas.learn("t", 20, 1.0)
    assert quotas.expected_output("t", 10_000) == pytest.approx(20, rel=0.01)


def test_accounts_of_removed_tenants_are_dropped_when_idle():
    quotas = Quotas()
    quotas.begin("busy", 1)
    quotas.account("gone")
    quotas.account("kept")
    quotas.forget_all_but(frozenset({"kept"}))
    assert set(quotas.accounts) == {"busy", "kept"}


def test_a_quota_that_was_removed_no_longer_counts():
    quotas = Quotas()
    assert accept(quotas, TenantPolicy(requests_per_minute=1), 1, 0.0)
    assert accept(quotas, TenantPolicy(), 1, 0.0)
    assert accept(quotas, TenantPolicy(requests_per_minute=1), 1, 0.0), "the new quota has a full bucket"


@pytest.mark.parametrize(
    ("allowed", "requested", "given"), [((-5, 5), 3, 3), ((1, 9), 0, 1), ((-9, -2), 0, -2), ((-5, 5), 0, 0)]
)
def test_the_default_priority_is_moved_into_the_range(allowed, requested, given):
    assert TenantPolicy(priority=allowed).priority_of(requested) == given


@pytest.mark.parametrize(("allowed", "requested"), [((-5, 5), 6), ((-5, 5), -6), ((1, 9), -1)])
def test_a_priority_outside_of_the_range_is_refused(allowed, requested):
    with pytest.raises(Forbidden, match=f"priority {requested} is outside this tenant's range") as refused:
        TenantPolicy(priority=allowed).priority_of(requested)
    assert refused.value.field == "priority"


def test_models_and_bounds():
    TenantPolicy().check_model("any")
    TenantPolicy(models=frozenset({"m"})).check_model("m")
    with pytest.raises(UnknownModel, match="no access"):
        TenantPolicy(models=frozenset({"m"})).check_model("n")
    assert TenantPolicy(max_queued=3).bounds(QueueBounds(10, 100)) == QueueBounds(3, 100)


def test_the_drain_rate_follows_ended_requests():
    rate = DrainRate()
    assert rate.retry_after(1, 0.0) == MAX_RETRY_SECONDS, "before any request has left"
    for number in range(1000):
        rate.note(number / 10)
    assert rate.per_second(100.0) == pytest.approx(10, rel=0.05)
    assert rate.retry_after(100, 100.0) == pytest.approx(10, rel=0.05)
    assert rate.retry_after(1, 100.0) == 1.0
    assert rate.retry_after(10_000, 100.0) == 60.0
    assert rate.per_second(1000.0) < 0.01
