"""Parts of streams: the first token at once, later ones together, all of them in order."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.ids import RequestId
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.engine.loop.engine_stream import StreamItem
from kvferry.engine.loop.stream_interval import Delivery, StreamInterval
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate


def tokens(name: str, *ids: int, ends: bool = False) -> Delivery:
    finish = FinishReason.LENGTH if ends else None
    update = SequenceUpdate(RequestId(name), tuple(map(SampledToken, ids)), finish, 0)
    return RequestId(name), StreamItem(update=update), ends


def ids_of(deliveries: list[Delivery], name: str) -> list[int]:
    return [
        token.token_id
        for request_id, item, _ in deliveries
        if request_id == name and item.update is not None
        for token in item.update.tokens
    ]


def test_after_the_first_token_parts_have_the_interval() -> None:
    parts = StreamInterval(3)
    counts = [len(parts.due([tokens("a", n)])) for n in range(8)]
    assert counts == [1, 0, 0, 3, 0, 0, 3, 0]
    ended = parts.due([tokens("a", 8, ends=True)])
    assert ids_of(ended, "a") == [7, 8]
    assert [is_last for *_, is_last in ended] == [False, True]
    assert parts.num_open == 0


def test_events_without_tokens_keep_their_place() -> None:
    parts = StreamInterval(2)
    started = (RequestId("a"), StreamItem(is_started=True), False)
    assert parts.due([started]) == [started]
    parts.due([tokens("a", 1)])
    assert parts.due([tokens("a", 2)]) == []
    assert parts.due([started]) == []
    assert parts.due([tokens("a", 3)]) == [tokens("a", 2), started, tokens("a", 3)]


def test_an_aborted_request_is_forgotten() -> None:
    parts = StreamInterval(4)
    parts.due([tokens("a", 1)])
    parts.due([tokens("a", 2)])
    parts.drop(RequestId("a"))
    assert parts.num_open == 0
    assert ids_of(parts.due([tokens("a", 9)]), "a") == [9]


@given(
    interval=st.integers(1, 5),
    steps=st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), max_size=3), max_size=30),
)
def test_every_token_arrives_once_and_in_order(interval: int, steps: list[dict[str, int]]) -> None:
    parts, numbers, found = StreamInterval(interval), dict.fromkeys("abc", 0), dict[str, list[int]](a=[], b=[], c=[])
    for step in steps:
        items = []
        for name, count in step.items():
            items.append(tokens(name, *range(numbers[name], numbers[name] + count)))
            numbers[name] += count
        due = parts.due(items)
        for name, seen in found.items():
            seen += ids_of(due, name)
            assert bool(seen) == (numbers[name] > 0)
            assert numbers[name] - len(seen) < interval
    due = parts.due([tokens(name, number, ends=True) for name, number in numbers.items()])
    for name, seen in found.items():
        assert [*seen, *ids_of(due, name)] == list(range(numbers[name] + 1))
    assert parts.num_open == 0
