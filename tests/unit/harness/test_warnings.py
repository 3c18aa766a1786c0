"""Warnings that the tests ignore: each is a fault of a library, and no wider than that."""

import socket
import ssl
import struct

import pytest


def a_reset_client() -> socket.socket:
    """Return a client's socket whose peer has reset the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=10)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
    return client


def test_a_tls_client_that_is_reset_before_its_handshake_fails_no_test() -> None:
    with a_reset_client() as client, pytest.raises(ConnectionResetError):
        ssl.create_default_context().wrap_socket(client, server_hostname="kvferry.test")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_tls_sockets_that_nobody_closes_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=10)
        wrapped = ssl.create_default_context().wrap_socket(
            client, server_hostname="kvferry.test", do_handshake_on_connect=False
        )
        sockets = [wrapped]
        del wrapped
        with pytest.warns(ResourceWarning, match="raddr"):
            sockets.clear()
