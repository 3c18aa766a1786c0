"""Addresses of listeners: what is one, and how an error names the setting."""

import pytest

from kvferry.core.addresses import join_address, listen_address, split_address
from kvferry.core.errors import UsageError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[::]:9000", ("::", 9000)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["5", "8000", ":8000", "host", "host:", "host:x", "host:65536", "host:-1", "h:٣"])
def test_anything_else_is_refused_with_the_name_of_the_setting(address: str) -> None:
    with pytest.raises(UsageError) as refused:
        listen_address(address, "http")
    assert refused.value.message.startswith(f"http {address!r} must be host:port, for example")
    assert refused.value.field == "http"
