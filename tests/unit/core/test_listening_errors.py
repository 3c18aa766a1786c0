"""Errors about addresses that cannot be bound name the flag and the remedy."""

import errno
import socket

import pytest

from kvferry.core.errors import cannot_listen


def test_a_busy_port_has_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(OSError, match="in use") as caught:
            socket.create_server(busy.getsockname())
    error = cannot_listen("decode_listen", address, caught.value)
    assert error.message == (
        f"cannot listen on {address} (--decode-listen): Address already in use; stop the process that uses the port, "
        "or let --decode-listen 127.0.0.1:0 select a free one"
    )
    assert error.field == "decode_listen"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EADDRNOTAVAIL, ""), "Cannot assign requested address; set --http to an address of this machine"),
        (OSError(errno.EACCES, ""), "Permission denied; ports below 1024 need privileges; set --http to a higher port"),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known; set --http to another address",
        ),
        (OSError("odd"), "odd; set --http to another address"),
    ],
)
def test_other_failures_have_one_too(error: OSError, said: str) -> None:
    assert cannot_listen("http", "10.0.0.1:80", error).message == f"cannot listen on 10.0.0.1:80 (--http): {said}"
