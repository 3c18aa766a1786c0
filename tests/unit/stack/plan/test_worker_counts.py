"""The default workers of a stack."""

import pytest

from kvferry.stack.plan.worker_counts import FEW_CORES, worker_counts

AUTO = {"prefill": "auto", "decode": "auto", "both": "auto"}
PAIR = {"prefill": 1, "decode": 1, "both": 0}
ONE = {"prefill": 0, "decode": 0, "both": 1}


@pytest.mark.parametrize(
    ("given", "cores", "more", "found"),
    [
        ({}, 1, {}, ONE),
        ({}, FEW_CORES, {}, ONE),
        ({}, FEW_CORES + 1, {}, PAIR),
        ({}, 2, {"has_gpu": True}, PAIR),
        ({}, 2, {"has_handoff": True}, PAIR),
        ({"prefill": 1}, 2, {}, PAIR),
        ({"decode": 3}, 2, {}, {**PAIR, "decode": 3}),
        ({"both": 2}, 2, {}, {**PAIR, "both": 2}),
        ({"prefill": 0, "decode": 0, "both": 1}, 64, {}, ONE),
    ],
)
def test_one_worker_on_few_cores_unless_something_else_is_asked_for(given, cores, more, found) -> None:
    counts, reason = worker_counts({**AUTO, **given}, cores, **{"has_gpu": False, "has_handoff": False, **more})
    assert counts == found
    assert bool(reason) == (counts == ONE and not given)


def test_the_reason_names_the_cores_and_the_other_choice() -> None:
    _, reason = worker_counts(AUTO, 2, has_gpu=False, has_handoff=False)
    assert "faster on 2 CPU cores" in reason
    assert "--prefill 1 --decode 1" in reason
