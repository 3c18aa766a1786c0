"""The bytes that the store in memory counts are those of what it keeps; see `test_stored_responses` for its other
properties."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.gateway.decide.config import StoreLimits
from kvferry.gateway.http.responses.memory_store import MemoryResponses
from kvferry.gateway.http.responses.store import Earlier, NewResponse, ResponseNotFound

LIMITS = StoreLimits(tenant_bytes=8000, total_bytes=20000, seconds=60.0)


def new(size: int, earlier: Earlier | None = None) -> NewResponse:
    return NewResponse(b"r" * size, b"i" * size, b"o" * size, earlier)


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
    asyncio.run(_apply(steps))


async def _apply(steps: list[tuple[str, str, int, int]]) -> None:
    clock = ManualClock()
    store = MemoryResponses(LIMITS, clock)
    for action, tenant, number, size in steps:
        name = str(number)
        try:
            if action == "put":
                await store.put(tenant, name, new(size))
            elif action == "continue":
                earlier, _ = await store.continued(tenant, name, "f")
                await store.put(tenant, str(size % 6), new(size, earlier))
            elif action == "get":
                await store.read(tenant, name, "f")
            elif action == "delete":
                await store.delete(tenant, name)
            else:
                clock.advance(size / 30)
        except ResponseNotFound:
            pass
        owners = {tenant: owner for tenant, owner in store._tenants.items() if owner.responses}
        total = 0
        for owner in owners.values():
            found = [entry for entry, _ in owner.responses.values()]
            segments = {id(segment): segment for entry in found for segment in entry.transcript}
            num_bytes = sum(1024 + len(entry.kept.response) + len(entry.kept.own_items) for entry in found)
            num_bytes += sum(len(segment.items) for segment in segments.values())
            assert owner.num_bytes == num_bytes <= LIMITS.tenant_bytes
            total += num_bytes
        assert store.num_bytes == total <= LIMITS.total_bytes
