"""Number of tokens that a draft model proposes: the most profitable number, and occasional probes for measurements."""

import pytest

from kvferry.engine.schedule.speculation.draft_depth import DraftDepth


def flat(price: float):
    """Return a price that is the same for any number of rows."""
    return lambda rows: price


def linear(price: float):
    """Return a price that is proportional to the number of rows."""
    return lambda rows: price * rows


def test_the_depth_maximizes_the_tokens_per_second() -> None:
    depth = DraftDepth(8)
    # 1 + p + .. + p^m tokens in 1 + m / 10 seconds: for p = 0.8 the best m is 5.
    rates = {m: sum(0.8**i for i in range(m + 1)) / (1 + m / 10) for m in range(9)}
    assert depth.choose(1, 1, 0.8, flat(1.0), flat(0.1)) == max(rates, key=lambda m: rates[m])
    assert depth.choose(1, 1, 0.95, flat(1.0), flat(0.1)) == 8
    assert depth.choose(1, 1, 0.3, flat(1.0), flat(0.1)) == 1


@pytest.mark.parametrize(("probability", "verify", "draft"), [(0.1, flat(1.0), 0.1), (0.9, linear(1.0), 0.2)])
def test_without_a_gain_only_probes_after_pauses_are_proposed(probability, verify, draft) -> None:
    depth, chosen = DraftDepth(8), []
    for _ in range(300):
        chosen.append(depth.choose(2, 2, probability, verify, flat(draft)))
        depth.advance(chosen[-1])
    probes = [i for i, count in enumerate(chosen) if count]
    assert probes == [64, 193], "the pause between probes doubles"
    assert {chosen[i] for i in probes} == {2}


def test_choose_alone_changes_no_state() -> None:
    depth = DraftDepth(8)
    for _ in range(100):
        assert depth.choose(1, 1, 0.0, flat(1.0), flat(0.1)) == 0


def test_before_a_measurement_and_with_a_fixed_number() -> None:
    assert DraftDepth(8).choose(1, 1, 0.9, flat(1.0), None) == 4
    assert DraftDepth(3).choose(1, 1, 0.9, flat(1.0), None) == 3
    assert DraftDepth(5, is_fixed=True).choose(9, 9, 0.0, linear(1.0), flat(9.0)) == 5
