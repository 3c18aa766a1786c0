"""Wishes as arrays: who is drawn where, and lists that hold each token of the vocabulary once."""

from dataclasses import replace

import pytest

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.step import ScheduledSequence
from kvferry.engine.wishes import Ragged, Way, lists_of, reads_tokens, seed_of, way_of

PLAIN = ScheduledSequence(
    request_id=RequestId("a"),
    token_ids=[5, 3, 5, 9, 9, 4],
    num_prompt=3,
    num_computed=5,
    num_scheduled=1,
    block_ids=[],
    samples=True,
    sampling=SamplingParams(temperature=0),
    sample_index=0,
)


def wishing(**wishes: object) -> ScheduledSequence:
    return replace(PLAIN, sampling=SamplingParams(**{"temperature": 0.0, **wishes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequence", "way"),
    [
        (PLAIN, Way.BEST),
        (wishing(stop_token_ids=(3,)), Way.BEST),
        (replace(PLAIN, banned_token_ids=(3,)), Way.DRAWN),
        (wishing(temperature=1.0, seed=1), Way.DRAWN),
        (wishing(logit_bias={3: 1.0}), Way.DRAWN),
        (wishing(presence_penalty=1.0), Way.DRAWN),
        (wishing(repetition_penalty=1.1), Way.DRAWN),
        (wishing(logprobs=0), Way.HOST),
        (wishing(temperature=1.0, seed=1, logprobs=3), Way.HOST),
    ],
)
def test_who_draws(sequence: ScheduledSequence, way: Way) -> None:
    assert way_of(sequence) is way


def test_only_penalties_must_know_the_tokens_before() -> None:
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    assert all(reads_tokens(wishing(**{name: 0.5})) for name in penalties)
    assert not reads_tokens(wishing(temperature=1.0, seed=1, logit_bias={1: 1.0}))


@pytest.mark.parametrize(("seed", "low"), [(0, 0), (-1, -1), ((1 << 64) - 1, -1), (1 << 63, -(1 << 63)), (7, 7)])
def test_seeds_keep_their_low_64_bits(seed: int, low: int) -> None:
    assert seed_of(wishing(temperature=1.0, seed=seed)) == low


def test_a_draw_without_a_seed_is_refused() -> None:
    assert seed_of(PLAIN) == 0
    with pytest.raises(InvariantBroken, match="request a came without a seed"):
        seed_of(wishing(temperature=1.0))


def told(part: Ragged | None) -> tuple[list[int], list[int], list[float], int]:
    assert part is not None
    return part.starts.tolist(), part.ids.tolist(), part.values.tolist(), part.longest


def test_the_lists() -> None:
    rows = [
        wishing(logit_bias={2: 1.5, 99: 3.0}, repetition_penalty=1.25),
        replace(PLAIN, banned_token_ids=(8, 3, 8, 50)),
        wishing(frequency_penalty=0.5, presence_penalty=0.25),
    ]
    lists = lists_of(rows, 10)
    assert told(lists.bias) == ([0, 1, 1, 1], [2], [1.5], 1)
    assert told(lists.seen) == ([0, 4, 4, 4], [3, 4, 5, 9], [1.25] * 4, 4)
    assert told(lists.generated) == ([0, 0, 0, 2], [9, 4], [1.25, 0.75], 2)
    assert told(lists.banned) == ([0, 0, 2, 2], [8, 3], [0.0, 0.0], 2)
    assert not lists.is_empty
    assert lists_of([PLAIN, wishing(temperature=1.0, seed=1)], 10).is_empty
