"""Prefixes that endpoints are assumed to have."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.picker.decide.prefix_history import DEFAULT_CHUNKS, MAX_ENDPOINTS, PrefixHistory


def test_the_longest_known_beginning_counts() -> None:
    history = PrefixHistory()
    history.sent("a", [1, 2, 3])
    history.sent("b", [1, 2])
    history.sent("c", [2, 3])
    assert history.cached([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert history.cached([2, 3]) == {"a": 2, "c": 2, "b": 1}
    assert history.cached([]) == {}


def test_an_endpoint_keeps_as_much_as_its_memory_and_drops_ends_first() -> None:
    history = PrefixHistory()
    history.limit("a", 256)
    history.sent("a", range(1, 301))
    assert history.num_chunks("a") == 256
    assert history.cached(range(1, 301)) == {"a": 256}
    history.sent("a", range(1000, 1256))
    assert history.cached(range(1, 301)) == {}


def test_all_endpoints_share_the_total() -> None:
    history = PrefixHistory(max_total=2048)
    for number in range(8):
        history.sent(str(number), range(number * 10_000, number * 10_000 + 2000))
    assert all(history.num_chunks(str(number)) <= 2048 for number in range(8))
    assert sum(history.num_chunks(str(number)) for number in range(8)) <= 2048 * 3


def test_forgotten_endpoints_free_their_places() -> None:
    history = PrefixHistory()
    for number in range(3 * MAX_ENDPOINTS):
        history.sent(str(number), [number])
        history.forget(str(number))
        history.forget(str(number))
    history.sent("last", [7])
    assert history.cached([7]) == {"last": 1}


def test_more_endpoints_than_places_have_no_history() -> None:
    history = PrefixHistory()
    for number in range(MAX_ENDPOINTS + 2):
        history.sent(str(number), [1])
    assert len(history.cached([1])) == MAX_ENDPOINTS


def test_an_unknown_memory_has_a_default() -> None:
    history = PrefixHistory()
    history.limit("a", 0)
    history.sent("a", range(DEFAULT_CHUNKS + 10))
    assert history.num_chunks("a") == DEFAULT_CHUNKS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 20), max_size=8)), max_size=30))
def test_the_index_agrees_with_a_plain_account(sent: list[tuple[str, list[int]]]) -> None:
    history, plain = PrefixHistory(), dict[str, set[int]]()
    for address, names in sent:
        history.sent(address, names)
        if names:
            plain.setdefault(address, set()).update(names)
    prompt = [3, 5, 7]
    for address, held in plain.items():
        depth = next((number for number, name in enumerate(prompt) if name not in held), len(prompt))
        assert history.cached(prompt).get(address, 0) == depth
