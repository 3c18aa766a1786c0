"""A trial fails on wrong tokens, unexpected errors and requests that hang."""

import pytest
from harness.faults.cases import Case
from harness.faults.traffic import Ended
from harness.faults.trial import check, first_normal, workers_used

from kvferry.core.inference.chunks import Timing

STRICT = Case("shm", "x", "all right")
LENIENT = Case("shm", "x", "right, or an error", may_fail=True)


def fetched(prefill: str, decode: str, at: float) -> Ended:
    return Ended(at, at + 1, timing=Timing(handoff_outcome="fetched", prefill_worker=prefill, decode_worker=decode))


@pytest.mark.parametrize("case", [STRICT, LENIENT])
def test_a_wrong_token_fails_every_case(case: Case) -> None:
    with pytest.raises(AssertionError, match="1 requests had wrong tokens"):
        check(case, [Ended(0, 1), Ended(0, 1, wrong="(1,), not (2,)")], [Ended(0, 1)])


def test_an_error_fails_a_case_that_allows_none() -> None:
    gone = Ended(0, 1, error="UNAVAILABLE: nobody is there")
    check(LENIENT, [gone], [gone])
    with pytest.raises(AssertionError, match="errors that are not permitted"):
        check(STRICT, [gone], [gone])


def test_only_unavailable_is_a_clear_error() -> None:
    late = Ended(0, 1, error="DEADLINE_EXCEEDED: too late")
    with pytest.raises(AssertionError, match="DEADLINE_EXCEEDED"):
        check(LENIENT, [late], [late])


def test_a_request_that_hangs_fails() -> None:
    with pytest.raises(AssertionError, match="took 61"):
        check(STRICT, [Ended(0, 61)], [Ended(0, 61)])


def test_unavailability_is_expected_when_the_missing_worker_was_the_last() -> None:
    since = [fetched("p", "d0", 0), fetched("p", "d0", 1), fetched("p", "d1", 2), fetched("p", "d1", 3)]
    assert first_normal(lambda ended: workers_used(ended) == {"p", "d0", "d1"}, since) == 3
    assert workers_used([Ended(0, 1, error="UNAVAILABLE: x", timing=since[0].timing)]) == set()
