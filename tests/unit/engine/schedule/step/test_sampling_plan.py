"""Sampling plans as arrays: which row is sampled where, and token lists without repetition."""

from dataclasses import replace

import pytest

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.step.sampling_plan import (
    Ragged,
    SamplingPath,
    banned_now,
    lists_of,
    reads_tokens,
    sampling_path,
    seed_of,
)
from kvferry.engine.schedule.step.step import ScheduledSequence

PLAIN = ScheduledSequence(
    request_id=RequestId("a"),
    token_ids=[5, 3, 5, 9, 9, 4],
    num_prompt=3,
    num_computed=5,
    num_scheduled=1,
    block_ids=[],
    num_sampled=1,
    sampling=SamplingParams(temperature=0),
    sample_index=0,
)


def sequence_with(**params: object) -> ScheduledSequence:
    return replace(PLAIN, sampling=SamplingParams(**{"temperature": 0.0, **params}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequence", "way"),
    [
        (PLAIN, SamplingPath.BEST),
        (sequence_with(stop_token_ids=(3,)), SamplingPath.BEST),
        (replace(PLAIN, banned_token_ids=(3,)), SamplingPath.DRAWN),
        (sequence_with(temperature=1.0, seed=1), SamplingPath.DRAWN),
        (sequence_with(logit_bias={3: 1.0}), SamplingPath.DRAWN),
        (sequence_with(presence_penalty=1.0), SamplingPath.DRAWN),
        (sequence_with(repetition_penalty=1.1), SamplingPath.DRAWN),
        (sequence_with(logprobs=0), SamplingPath.HOST),
        (sequence_with(allowed_token_ids=(3,)), SamplingPath.HOST),
        (sequence_with(bad_word_token_ids=((3,),)), SamplingPath.DRAWN),
        (sequence_with(typical_p=0.5), SamplingPath.BEST),
        (sequence_with(temperature=1.0, seed=1, typical_p=0.5), SamplingPath.HOST),
        (sequence_with(temperature=1.0, seed=1, logprobs=3), SamplingPath.HOST),
    ],
)
def test_the_sampling_path_of_a_row(sequence: ScheduledSequence, way: SamplingPath) -> None:
    assert sampling_path(sequence) is way


def test_only_penalties_and_bad_words_of_several_tokens_depend_on_earlier_tokens() -> None:
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    assert all(reads_tokens(sequence_with(**{name: 0.5})) for name in penalties)
    assert not reads_tokens(sequence_with(temperature=1.0, seed=1, logit_bias={1: 1.0}))
    assert not reads_tokens(sequence_with(bad_word_token_ids=((3,), (4,)), allowed_token_ids=(1,), typical_p=0.5))
    assert reads_tokens(sequence_with(bad_word_token_ids=((3,), (4, 5))))


def test_a_bad_word_is_matched_against_the_end_of_the_output() -> None:
    words = sequence_with(bad_word_token_ids=((1,), (4, 2), (9, 4, 3), (5, 9, 9, 4, 6), (9, 8), (9, 9, 4, 7, 7)))
    assert banned_now(replace(words, banned_token_ids=(0,))) == [0, 1, 2, 3]
    assert banned_now(replace(words, num_prompt=2)) == [1, 2, 3, 6]
    assert banned_now(replace(words, num_prompt=6)) == [1]


@pytest.mark.parametrize(("seed", "low"), [(0, 0), (-1, -1), ((1 << 64) - 1, -1), (1 << 63, -(1 << 63)), (7, 7)])
def test_seeds_keep_their_low_64_bits(seed: int, low: int) -> None:
    assert seed_of(sequence_with(temperature=1.0, seed=seed)) == low


def test_a_draw_without_a_seed_is_refused() -> None:
    assert seed_of(PLAIN) == 0
    with pytest.raises(InvariantBroken, match="request a has no seed"):
        seed_of(sequence_with(temperature=1.0))


def flattened(part: Ragged | None) -> tuple[list[int], list[int], list[float], int]:
    assert part is not None
    return part.starts.tolist(), part.ids.tolist(), part.values.tolist(), part.longest


def test_the_lists() -> None:
    rows = [
        sequence_with(logit_bias={2: 1.5, 99: 3.0}, repetition_penalty=1.25),
        replace(PLAIN, banned_token_ids=(8, 3, 8, 50)),
        sequence_with(frequency_penalty=0.5, presence_penalty=0.25),
    ]
    lists = lists_of(rows, 10)
    assert flattened(lists_of([sequence_with(bad_word_token_ids=((4, 2), (7,)))], 10).banned) == (
        [0, 2],
        [2, 7],
        [0.0, 0.0],
        2,
    )
    assert flattened(lists.bias) == ([0, 1, 1, 1], [2], [1.5], 1)
    assert flattened(lists.seen) == ([0, 4, 4, 4], [3, 4, 5, 9], [1.25] * 4, 4)
    assert flattened(lists.generated) == ([0, 0, 0, 2], [9, 4], [1.25, 0.75], 2)
    assert flattened(lists.banned) == ([0, 0, 2, 2], [8, 3], [0.0, 0.0], 2)
    assert not lists.is_empty
    assert lists_of([PLAIN, sequence_with(temperature=1.0, seed=1)], 10).is_empty
