"""Queues against their definition: the sequence with the lowest rank, after any additions, removals and changes of
rank.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams, ScoredToken
from kvferry.engine.schedule.policies.scored_prompts import ScoredPromptsQueue
from kvferry.engine.schedule.policies.waiting_queue import (
    BATCH_SIZE,
    RankQueue,
    ShortestFirstQueue,
    TwoLevelQueue,
    WaitingQueue,
    WeightedQueue,
)
from kvferry.engine.schedule.step.sequence import Sequence, SequenceEvent, SequenceState
from kvferry.engine.schedule.step.sequence_request import SequenceRequest

NAMER = BlockNamers(b"k").of("", fingerprint=b"f", block_tokens=4)


def a_sequence(number: int, *, priority: int = 0, max_tokens_total: int = 10) -> Sequence:
    name = RequestId(f"r{number}")
    request = SequenceRequest(name, 1, SamplingParams(), NAMER, max_tokens_total, frozenset(), priority=priority)
    return Sequence(request, [0], arrival=number)


def drain(queue: WaitingQueue) -> list[int]:
    order: list[int] = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        order.append(first.arrival)
    assert len(queue) == 0
    return order


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_a_rank_queue_is_a_sorted_list(entries: list[tuple[int, bool]]) -> None:
    queue = RankQueue(lambda s: (s.request.priority, s.arrival))
    sequences = [a_sequence(number, priority=priority) for number, (priority, _) in enumerate(entries)]
    for sequence in sequences:
        queue.add(sequence)
    kept = [s for s, (_, removed) in zip(sequences, entries, strict=True) if not removed]
    for sequence, (_, removed) in zip(sequences, entries, strict=True):
        if removed:
            queue.remove(sequence)
    assert {s.arrival for s in queue} == {s.arrival for s in kept}
    assert drain(queue) == [s.arrival for s in sorted(kept, key=lambda s: (s.request.priority, s.arrival))]


def test_a_sequence_that_returns_is_ranked_once() -> None:
    queue = RankQueue(lambda s: (s.arrival,))
    first, second = a_sequence(1), a_sequence(2)
    for sequence in (first, second):
        queue.add(sequence)
    queue.remove(first)
    queue.add(first)
    assert drain(queue) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30))
def test_shortest_first_ranks_the_first_sequence_again(entries: list[tuple[int, int]]) -> None:
    lengths = {number: before for number, (before, _) in enumerate(entries)}
    queue = ShortestFirstQueue(lambda s: (lengths[s.arrival], s.arrival))
    for number in lengths:
        queue.add(a_sequence(number))
    for number, (before, more) in enumerate(entries):
        lengths[number] = before + more  # the cached blocks were evicted since, so the earlier rank is too low
    order = drain(queue)
    assert order == sorted(lengths, key=lambda number: (lengths[number], number))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_two_levels_admit_the_arrivals_in_groups_and_each_group_shortest_first(lengths: list[int]) -> None:
    # A request at position p is staged at refill p // BATCH_SIZE + 1, independently of later arrivals.
    queue = TwoLevelQueue(lambda s: (s.arrival,), lambda s: (lengths[s.arrival], s.arrival))
    for number in range(len(lengths)):
        queue.add(a_sequence(number))
    expected: list[int] = []
    for start in range(0, len(lengths), BATCH_SIZE):
        group = range(start, min(start + BATCH_SIZE, len(lengths)))
        expected += sorted(group, key=lambda number: (lengths[number], number))
    assert drain(queue) == expected


def test_the_staging_bounds_how_often_remaining_tokens_are_computed() -> None:
    num_calls = 0

    def inner(sequence: Sequence) -> tuple[int, ...]:
        nonlocal num_calls
        num_calls += 1
        return (sequence.arrival,)

    queue = TwoLevelQueue(lambda s: (s.arrival,), inner)
    for number in range(1000):
        queue.add(a_sequence(number))
    queue.first()
    assert num_calls <= 2 * BATCH_SIZE


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), min_size=1, max_size=30),
    st.lists(st.booleans(), max_size=60),
)
def test_a_sequence_that_is_set_aside_keeps_its_share(entries: list[tuple[int, int, bool]], passes: list[bool]) -> None:
    def queue_of() -> WeightedQueue:
        queue = WeightedQueue({0: 4, 1: 2})
        for number, (priority, length, _) in enumerate(entries):
            queue.add(a_sequence(number, priority=priority, max_tokens_total=length))
        return queue

    plain, disturbed = queue_of(), queue_of()
    order: list[int] = []
    turns = iter(passes)
    while (first := disturbed.first()) is not None:
        if next(turns, False):
            disturbed.set_aside(first)
            second = disturbed.first()
            if second is not None:
                disturbed.set_aside(second)
                disturbed.add(second)
            disturbed.add(first)
            continue
        disturbed.remove(first)
        order.append(first.arrival)
    assert order == drain(plain)


@given(st.lists(st.sampled_from(["scored", "plain", "admit", "score", "abort"]), max_size=60))
def test_one_prompt_to_be_scored_is_among_the_others(moves: list[str]) -> None:
    inner = RankQueue(lambda s: (s.arrival,))
    queue = ScoredPromptsQueue(inner, lambda s: (s.request.priority, s.arrival), has_background=False)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for number, move in enumerate(moves):
        if move in ("scored", "plain"):
            wanted = SamplingParams(prompt_logprobs=0 if move == "scored" else None)
            request = SequenceRequest(RequestId(f"r{number}"), 2, wanted, NAMER, 10, frozenset())
            waiting.append(Sequence(request, [0, 1], arrival=number))
            queue.add(waiting[-1])
        elif move == "admit" and (first := queue.first()) is not None:
            queue.remove(first)
            waiting.remove(first)
            first.move(SequenceEvent.ADMIT)
            running.append(first)
        elif move == "score" and running:
            running.pop(0).sampling.add_scores((ScoredToken(1, 0.0, 1),), 1)
        elif move == "abort" and (waiting or running):
            last = (waiting or running).pop()
            if last.state is SequenceState.WAITING:
                queue.remove(last)
            last.move(SequenceEvent.ABORT)
        assert sorted(s.arrival for s in queue) == [s.arrival for s in waiting]
        assert (len(queue), queue.num_tokens) == (len(waiting), 2 * len(waiting))
        assert sum(s.sampling.is_scoring for s in (*inner, *running)) <= 1
    while waiting:
        first = queue.first()
        if first is None or (first.sampling.is_scoring and any(s.sampling.is_scoring for s in running)):
            running.pop(0).sampling.add_scores((ScoredToken(1, 0.0, 1),), 1)
            continue
        queue.remove(first)
        waiting.remove(first)
        first.move(SequenceEvent.ADMIT)
        running.append(first)
    assert queue.first() is None
