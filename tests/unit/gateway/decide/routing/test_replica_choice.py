import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.routes import Candidates, Replica, RouteReason, RouteRequest, choose, readers

_FACTOR = 1.25


def replica(name: str, load: int = 0, fingerprint: bytes = b"f", family: bytes = b"") -> Replica:
    return Replica(f"{name}:1", WorkerId(name), fingerprint, load, family)


_replicas = st.lists(st.integers(0, 50), min_size=1, max_size=12).map(
    lambda loads: [replica(f"w{i}", load) for i, load in enumerate(loads)]
)
_keys = st.binary(min_size=1, max_size=32)


def pick(key: bytes, replicas, load_factor: float):
    return PrefixHash(load_factor).one(RouteRequest(lambda _: key), replicas)


def route(candidates: Candidates, key: bytes = b"k", skip: RouteReason | None = None):
    return choose(RouteRequest(lambda _: key), candidates, PrefixHash(_FACTOR), skip_prefill=skip)


@given(_keys, _replicas, st.randoms())
def test_the_order_of_replicas_does_not_matter(key, replicas, random):
    shuffled = list(replicas)
    random.shuffle(shuffled)
    assert pick(key, shuffled, _FACTOR) == pick(key, replicas, _FACTOR)


@given(_keys, _replicas, st.floats(1.0, 4.0))
def test_no_replica_is_loaded_above_the_bound(key, replicas, factor):
    chosen = pick(key, replicas, factor)
    assert chosen is not None
    total = sum(r.load for r in replicas)
    assert chosen.replica.load + 1 <= math.ceil(factor * (total + 1) / len(replicas)) == chosen.capacity


@given(st.lists(_keys, min_size=1, max_size=60), st.integers(2, 8))
def test_requests_added_one_by_one_keep_the_bound(keys, count):
    replicas = {f"w{i}": replica(f"w{i}") for i in range(count)}
    for key in keys:
        chosen = pick(key, list(replicas.values()), _FACTOR)
        assert chosen is not None
        name = chosen.replica.worker_id
        replicas[name] = replace(replicas[name], load=replicas[name].load + 1)
    assert max(r.load for r in replicas.values()) <= math.ceil(_FACTOR * len(keys) / count)


@given(st.lists(_keys, min_size=1, max_size=40, unique=True), st.integers(2, 8), st.data())
def test_removing_a_replica_moves_only_its_own_requests(keys, count, data):
    replicas = [replica(f"w{i}") for i in range(count)]
    gone = data.draw(st.sampled_from(replicas))
    rest = [r for r in replicas if r != gone]
    for key in keys:
        before, after = pick(key, replicas, _FACTOR), pick(key, rest, _FACTOR)
        assert before is not None
        assert after is not None
        if before.preferred != gone.worker_id:
            assert after.preferred == before.preferred


def test_prefixes_spread_evenly():
    replicas = [replica(f"w{i}") for i in range(4)]
    counts = dict.fromkeys((r.worker_id for r in replicas), 0)
    for number in range(4000):
        chosen = pick(number.to_bytes(4, "big"), replicas, _FACTOR)
        assert chosen is not None
        counts[chosen.preferred] += 1
    assert all(850 < count < 1150 for count in counts.values())


def test_a_popular_prefix_spills_and_the_route_records_it():
    replicas = [replica("a"), replica("b")]
    first = pick(b"hot", replicas, _FACTOR)
    assert first is not None
    assert not first.spilled
    loaded = [replace(r, load=10 if r.worker_id == first.preferred else 0) for r in replicas]
    second = pick(b"hot", loaded, _FACTOR)
    assert second is not None
    assert second.spilled
    assert second.preferred == first.preferred


def test_a_worker_keeps_its_prefixes_on_another_address():
    before = [replica("a"), replica("b")]
    after = [replace(r, address=f"elsewhere-{r.worker_id}:2") for r in before]
    for number in range(50):
        key = bytes([number])
        old, new = pick(key, before, _FACTOR), pick(key, after, _FACTOR)
        assert old is not None
        assert new is not None
        assert old.preferred == new.preferred


@given(
    _keys,
    st.lists(st.sampled_from([b"f", b"g", b"h"]), max_size=5),
    st.lists(st.sampled_from([b"f", b"g"]), max_size=5),
)
def test_only_equal_layouts_are_paired(key, prefill_layouts, decode_layouts):
    candidates = Candidates(
        prefill=tuple(replica(f"p{i}", fingerprint=f) for i, f in enumerate(prefill_layouts)),
        decode=tuple(replica(f"d{i}", fingerprint=f) for i, f in enumerate(decode_layouts)),
    )
    chosen = route(candidates, key)
    if set(prefill_layouts) & set(decode_layouts):
        assert chosen is not None
        assert chosen.reason is RouteReason.PAIR
        assert chosen.prefill is not None
        assert chosen.prefill.replica.fingerprint == chosen.decode.replica.fingerprint
    elif decode_layouts:
        assert chosen is not None
        assert (chosen.prefill, chosen.reason) == (None, RouteReason.NO_PREFILL)
    else:
        assert chosen is None


_layouts = st.sampled_from([(b"f", b"m"), (b"g", b"m"), (b"h", b"n"), (b"i", b""), (b"j", b"")])


@given(_keys, st.lists(_layouts, max_size=5), st.lists(_layouts, max_size=5))
def test_layouts_of_one_family_are_paired_when_no_equal_ones_are_there(key, prefill_layouts, decode_layouts):
    made = [
        tuple(replica(f"{role}{i}", fingerprint=f, family=m) for i, (f, m) in enumerate(layouts))
        for role, layouts in (("p", prefill_layouts), ("d", decode_layouts))
    ]
    chosen = route(Candidates(prefill=made[0], decode=made[1], both=_B), key)
    assert chosen is not None
    equal = {f for f, _ in prefill_layouts} & {f for f, _ in decode_layouts}
    alike = {m for _, m in prefill_layouts} & {m for _, m in decode_layouts} - {b""}
    assert chosen.reason is (RouteReason.PAIR if equal else RouteReason.CONVERTED if alike else RouteReason.BOTH)
    if chosen.prefill is not None:
        p, d = chosen.prefill.replica, chosen.decode.replica
        assert (p.fingerprint == d.fingerprint) == bool(equal)
        assert equal or p.family == d.family


def test_a_reader_with_the_same_layout_is_preferred():
    like, alike, other = (
        replica(n, fingerprint=f, family=m) for n, f, m in [("a", b"f", b"m"), ("b", b"g", b"m"), ("c", b"h", b"n")]
    )
    assert readers([other, alike, like], b"f", b"m") == (like,)
    assert readers([other, alike], b"f", b"m") == (alike,)
    assert readers([other], b"f", b"m") == ()
    assert readers([replica("d", fingerprint=b"x")], b"f", b"") == ()


_P, _D, _B = (replica("p"),), (replica("d"),), (replica("b"),)


@pytest.mark.parametrize(
    ("candidates", "skip", "expected"),
    [
        (Candidates(_P, _D, _B), None, ("p", "d", RouteReason.PAIR)),
        (Candidates((), _D, _B), None, (None, "b", RouteReason.BOTH)),
        (Candidates(_P, (), _B), None, (None, "b", RouteReason.BOTH)),
        (Candidates((), _D, ()), None, (None, "d", RouteReason.NO_PREFILL)),
        (Candidates(_P, (), ()), None, None),
        (Candidates(), None, None),
        (Candidates(_P, _D, _B), RouteReason.SHORT_PROMPT, (None, "d", RouteReason.SHORT_PROMPT)),
        (Candidates(_P, (), _B), RouteReason.RESUME, (None, "b", RouteReason.RESUME)),
        (Candidates(_P, (), ()), RouteReason.RESUME, None),
    ],
)
def test_the_shape_of_a_route(candidates, skip, expected):
    chosen = route(candidates, skip=skip)
    if expected is None:
        assert chosen is None
    else:
        assert chosen is not None
        names = (chosen.prefill and chosen.prefill.replica.worker_id, chosen.decode.replica.worker_id, chosen.reason)
        assert names == expected
