"""Kept responses stay within their bounds, belong to their tenant, and expire."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.gateway.decide.config import StoreLimits
from kvferry.gateway.http.responses.store import KeptResponse, ResponseNotFound, ResponseStore, history, transcript

LIMITS = StoreLimits(tenant_bytes=8000, total_bytes=20000, seconds=60.0)


def kept(earlier: KeptResponse | None = None, size: int = 10) -> KeptResponse:
    items, output = b"i" * size, b"o" * size
    return KeptResponse(b"r" * size, items, transcript(earlier, items, output))


def test_a_response_is_its_tenants_only() -> None:
    store = ResponseStore(LIMITS, ManualClock())
    store.put("a", "x", kept())
    assert store.get("a", "x", "f").response
    for tenant, name in (("b", "x"), ("a", "y"), ("", "x")):
        with pytest.raises(ResponseNotFound) as missing:
            store.get(tenant, name, "previous_response_id")
        assert missing.value.field == "previous_response_id"
    with pytest.raises(ResponseNotFound):
        store.delete("b", "x")
    store.delete("a", "x")
    assert (store.count, store.num_bytes) == (0, 0)


def test_a_response_expires_after_its_last_use() -> None:
    clock = ManualClock()
    store = ResponseStore(LIMITS, clock)
    store.put("a", "x", kept())
    clock.advance(59)
    store.get("a", "x", "f")
    clock.advance(59)
    store.get("a", "x", "f")
    clock.advance(61)
    with pytest.raises(ResponseNotFound):
        store.get("a", "x", "f")
    assert store.num_bytes == 0


def test_the_least_recently_used_is_evicted_and_its_items_stay_with_later_turns() -> None:
    store = ResponseStore(LIMITS, ManualClock())
    first = kept(size=300)
    store.put("a", "1", first)
    store.put("a", "2", kept(first, size=300))
    store.put("a", "3", kept(size=300))
    store.get("a", "2", "f")
    store.put("a", "4", kept(size=300))
    with pytest.raises(ResponseNotFound):
        store.get("a", "1", "f")
    assert history(store.get("a", "2", "f")) == [b"i" * 300, b"o" * 300, b"i" * 300, b"o" * 300]
    assert history(None) == []


def test_a_response_beyond_the_bound_is_not_kept() -> None:
    store = ResponseStore(LIMITS, ManualClock())
    store.put("a", "x", kept(size=4000))
    assert (store.count, store.num_bytes) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "continue", "get", "delete", "wait"]),
            st.sampled_from(["a", "b", "c", "d"]),
            st.integers(0, 5),
            st.integers(1, 1500),
        ),
        max_size=60,
    )
)
def test_bounds_hold_and_bytes_are_those_of_the_kept(steps: list[tuple[str, str, int, int]]) -> None:
    clock = ManualClock()
    store = ResponseStore(LIMITS, clock)
    for action, tenant, number, size in steps:
        name = str(number)
        try:
            if action == "put":
                store.put(tenant, name, kept(size=size))
            elif action == "continue":
                store.put(tenant, str(size % 6), kept(store.get(tenant, name, "f"), size))
            elif action == "get":
                store.get(tenant, name, "f")
            elif action == "delete":
                store.delete(tenant, name)
            else:
                clock.advance(size / 30)
        except ResponseNotFound:
            pass
        owners = {tenant: owner for tenant, owner in store._tenants.items() if owner.responses}
        total = 0
        for owner in owners.values():
            found = [entry for entry, _ in owner.responses.values()]
            segments = {id(segment): segment for entry in found for segment in entry.transcript}
            num_bytes = sum(1024 + len(entry.response) + len(entry.own_items) for entry in found)
            num_bytes += sum(len(segment.items) for segment in segments.values())
            assert owner.num_bytes == num_bytes <= LIMITS.tenant_bytes
            total += num_bytes
        assert store.num_bytes == total <= LIMITS.total_bytes
