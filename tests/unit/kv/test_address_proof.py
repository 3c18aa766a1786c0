"""Addresses of workers of other pools, and damaged ones, are refused before they are parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.connectors.address_proof import checked, proved
from kvferry.kv.interface.connector import ReadError

NEW, OLD = b"the newer secret of the pool", b"the older secret of the pool"


@pytest.mark.parametrize("secrets", [(), (NEW,), (NEW, OLD), (OLD, NEW)])
def test_an_address_is_accepted_during_a_rotation_of_secrets(secrets: tuple[bytes, ...]) -> None:
    assert checked(secrets, proved(secrets[:1], b"address")) == b"address"
    assert checked(secrets, proved(secrets[-1:], b"address")) == b"address"


@given(st.binary(max_size=64), st.integers(0, 79), st.integers(1, 255))
def test_a_changed_address_is_refused(address: bytes, at: int, change: int) -> None:
    whole = bytearray(proved((NEW,), address))
    whole[at % len(whole)] ^= change
    with pytest.raises(ReadError, match="not made by a worker of this pool, or is damaged"):
        checked((NEW,), bytes(whole))


@pytest.mark.parametrize("address", [b"", b"short", bytes(16), proved((OLD,), b"address"), proved((), b"address")])
def test_an_address_without_the_pools_secret_is_refused(address: bytes) -> None:
    with pytest.raises(ReadError):
        checked((NEW,), address)
