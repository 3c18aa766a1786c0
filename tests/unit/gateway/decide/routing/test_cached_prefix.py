"""Choice of replicas by cached prefixes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.cache_map.cache_map import Basis, CacheMap
from kvferry.gateway.decide.cache_map.feed_events import Digest, SnapshotPart, xor_of
from kvferry.gateway.decide.cache_map.map_states import MapEvent, MapState
from kvferry.gateway.decide.cache_map.seen_blocks import SeenBlocks
from kvferry.gateway.decide.routing.cached_prefix import PromptCaches, PromptNames, block_names
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.route_notes import route_notes
from kvferry.gateway.decide.routing.routes import (
    Candidates,
    Pick,
    PredictedPrefix,
    Replica,
    RouteReason,
    RouteRequest,
    choose,
)

NAMERS = BlockNamers(b"key")
PROMPT = [(5 * i) % 97 for i in range(100)]


def replica(name: str, load: int = 0, layout: bytes = b"l", block_tokens: int = 16) -> Replica:
    return Replica(f"{name}:1", WorkerId(name), b"f", load, layout_fingerprint=layout, block_tokens=block_tokens)


def caches(cache_map: CacheMap, prompt: list[int] = PROMPT, least: int = 4, tenant: str = "t") -> PromptCaches:
    return PromptCaches(cache_map, NAMERS, PromptNames(), tenant, prompt, least)


def snapshot(cache_map: CacheMap, of: Replica, prompt: list[int], num_blocks: int) -> None:
    names = block_names(NAMERS, "t", of, prompt)[:num_blocks]
    cache_map.join(of.address)
    cache_map.subscribed(of.address)
    part = SnapshotPart("i", 0, b"".join(names), True, Digest(len(names), xor_of(b"".join(names))))
    for _ in cache_map.apply(of.address, part):
        pass


@pytest.fixture
def cache_map() -> CacheMap:
    return CacheMap(ManualClock())


def test_each_layout_has_its_own_names(cache_map: CacheMap) -> None:
    a, b = replica("a"), replica("b", layout=b"other", block_tokens=32)
    snapshot(cache_map, a, PROMPT, 5)
    snapshot(cache_map, b, PROMPT, 3)
    found = caches(cache_map)
    assert [found(one).tokens for one in (a, b, replica("c"))] == [80, 96, 0]
    assert found(a) == PredictedPrefix(80, 80, True, MapState.EXACT, Basis.EXACT)
    assert caches(cache_map, tenant="u")(a).tokens == 0


def test_another_replica_may_have_more(cache_map: CacheMap) -> None:
    a, b, c = replica("a"), replica("b"), replica("c", layout=b"other")
    snapshot(cache_map, a, PROMPT, 2)
    snapshot(cache_map, b, PROMPT, 5)
    snapshot(cache_map, c, PROMPT, 6)
    chosen = {one: Pick(one, one.worker_id, 0, 3) for one in (a, b, c, replica("new"))}
    assert [caches(cache_map).elsewhere(pick) for pick in chosen.values()] == [80, 32, 0, 80]
    cache_map.lost(b.address, MapEvent.GAP, "a test")
    assert caches(cache_map).elsewhere(chosen[a]) == 0, "a map that is not exact says nothing"


def test_blocks_of_earlier_prompts_are_seen(cache_map: CacheMap) -> None:
    a, seen = replica("a"), SeenBlocks()
    pick = Pick(a, a.worker_id, 0, 1)
    assert caches(cache_map).note_seen(pick, seen) == (0, 96)
    assert caches(cache_map, PROMPT[:96]).note_seen(pick, seen) == (80, 80)
    assert caches(cache_map, [*PROMPT[:50], *PROMPT]).note_seen(pick, seen) == (48, 144)
    assert caches(cache_map, tenant="u").note_seen(pick, seen) == (0, 96)
    assert caches(cache_map, PROMPT[:9]).note_seen(pick, seen) == (0, 0)


def test_the_block_of_the_last_token_is_computed_again(cache_map: CacheMap) -> None:
    a = replica("a")
    snapshot(cache_map, a, PROMPT, 6)
    assert caches(cache_map, PROMPT[:96])(a).tokens == 80
    assert caches(cache_map, PROMPT[:97])(a).tokens == 96


def test_a_short_prefix_does_not_decide(cache_map: CacheMap) -> None:
    a = replica("a")
    snapshot(cache_map, a, PROMPT, 3)
    assert not caches(cache_map, least=4)(a).decides
    assert caches(cache_map, least=3)(a).decides
    assert caches(cache_map, PROMPT[:40], least=4)(a).decides, "a prompt of two blocks is cached whole"
    assert not caches(cache_map, PROMPT[:10])(a).decides
    others = [replica(f"w{n}") for n in range(8)]
    chosen = PrefixHash(1.25).one(RouteRequest(lambda _: b"k", caches(cache_map, least=4)), [a, *others])
    assert chosen is not None
    bare = PrefixHash(1.25).one(RouteRequest(lambda _: b"k"), [a, *others])
    assert bare is not None
    assert chosen.replica == bare.replica


def test_names_are_computed_once_and_extended() -> None:
    names, a = PromptNames(), replica("a")
    expected = block_names(NAMERS, "t", a, PROMPT)
    assert names.of(NAMERS, "t", a, PROMPT, 2) == expected[:2]
    assert names.of(NAMERS, "t", a, PROMPT[:50], 100) == expected[:3]
    assert names.of(NAMERS, "t", a, PROMPT, 100) == expected
    assert names.of(NAMERS, "t", a, PROMPT, 1) == expected[:1]


def test_most_cached_tokens_win_within_the_bound_on_load(cache_map: CacheMap) -> None:
    workers = [replica(f"w{n}") for n in range(4)]
    snapshot(cache_map, workers[2], PROMPT, 6)
    snapshot(cache_map, workers[3], PROMPT, 5)
    chosen = PrefixHash(1.25).one(RouteRequest(lambda _: b"k", caches(cache_map)), workers)
    assert chosen is not None
    assert (chosen.replica.worker_id, chosen.cached.tokens, chosen.spilled) == ("w2", 96, False)
    busy = [replica(one.worker_id, load=3 if one.worker_id == "w2" else 0) for one in workers]
    chosen = PrefixHash(1.25).one(RouteRequest(lambda _: b"k", caches(cache_map)), busy)
    assert chosen is not None
    assert (chosen.replica.worker_id, chosen.preferred, chosen.spilled) == ("w3", "w2", True)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=8), st.randoms())
def test_the_choice_is_bounded_and_does_not_depend_on_the_order(terms: list[tuple[int, int]], rng: random.Random):
    workers = [replica(f"w{n}", load) for n, (load, _) in enumerate(terms)]
    blocks = {f"w{n}": number for n, (_, number) in enumerate(terms)}

    def cached(one: Replica) -> PredictedPrefix:
        number = blocks[one.worker_id]
        return PredictedPrefix(16 * number, 16 * number, number > 0, MapState.EXACT, Basis.EXACT)

    chosen = PrefixHash(1.25).one(RouteRequest(lambda _: b"k", cached), workers)
    assert chosen is not None
    assert chosen.replica.load < chosen.capacity
    free = [one for one in workers if one.load < chosen.capacity]
    assert cached(chosen.replica).tokens == max(cached(one).tokens for one in free)
    shuffled = list(workers)
    rng.shuffle(shuffled)
    assert PrefixHash(1.25).one(RouteRequest(lambda _: b"k", cached), shuffled) == chosen


def test_a_burst_with_a_new_prefix_goes_to_one_replica_within_the_bound(cache_map: CacheMap) -> None:
    loads = dict.fromkeys((f"w{n}" for n in range(4)), 0)
    chosen = []
    for _ in range(4):
        found = caches(cache_map)
        best = PrefixHash(8.0).one(
            RouteRequest(lambda _: random.randbytes(8), found), [replica(n, load) for n, load in loads.items()]
        )
        assert best is not None
        found.chose(best)
        loads[best.replica.worker_id] += 1
        chosen.append(best)
    # Unequal keys would spread the requests over replicas; the prediction for dispatched blocks keeps them on one.
    assert {one.replica.worker_id for one in chosen} == {chosen[0].replica.worker_id}
    assert chosen[1].cached.tokens == 96
    assert chosen[1].cached.confirmed_tokens == 0


def test_a_warm_decode_worker_computes_a_short_tail(cache_map: CacheMap) -> None:
    p, d, e = replica("p"), replica("d"), replica("e")
    snapshot(cache_map, d, PROMPT, 6)
    snapshot(cache_map, e, [], 0)
    candidates = Candidates(prefill=(p,), decode=(d, e))

    def route(enough: int | None):
        return choose(
            RouteRequest(lambda _: b"k", caches(cache_map)), candidates, PrefixHash(1.25), enough_tokens=enough
        )

    warm, cold, asked_for_none = route(96), route(97), route(None)
    assert warm is not None
    assert cold is not None
    assert asked_for_none is not None
    assert (warm.prefill, warm.decode.replica, warm.reason) == (None, d, RouteReason.SHORT_TAIL)
    assert cold.reason is asked_for_none.reason is RouteReason.PAIR
    caches(cache_map, [*PROMPT, *PROMPT]).chose(warm.decode)
    longer = caches(cache_map, [*PROMPT, *PROMPT])
    again = choose(RouteRequest(lambda _: b"k", longer), candidates, PrefixHash(1.25), enough_tokens=150)
    assert again is not None
    assert again.reason is RouteReason.PAIR, "only blocks that the worker has reported may make prefill unnecessary"


def test_route_notes_have_the_terms_of_every_candidate(cache_map: CacheMap) -> None:
    a, b = replica("a", load=1), replica("b")
    snapshot(cache_map, b, PROMPT, 5)
    route = choose(RouteRequest(lambda _: b"k", caches(cache_map)), Candidates(both=(a, b)), PrefixHash(1.25))
    assert route is not None
    (note,) = route_notes(route, "prefix-hash")
    assert (note.worker, note.cached_tokens, note.map_state) == ("b", 80, "exact")
    assert [(c.worker, c.load, c.cached_tokens, c.map_state, c.basis) for c in note.candidates] == [
        ("b", 0, 80, "exact", "exact"),
        ("a", 1, 0, "blind", "history"),
    ]
