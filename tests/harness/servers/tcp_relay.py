"""A relay between TCP clients and a server that records the bytes of both directions and may edit them."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_JOIN_SECONDS = 10.0
_TICK_SECONDS = 0.02

Edit = Callable[[int, bytes], bytes]
"""Function from the offset of bytes in a connection's direction, and the bytes, to the bytes that are sent instead; the
connection ends if these are fewer."""


def as_they_are(offset: int, data: bytes) -> bytes:
    """Edit nothing."""
    return data


def flip(at: int, bit: int = 0) -> Edit:
    """Return an edit that flips a bit of the byte at an offset."""

    def edit(offset: int, data: bytes) -> bytes:
        if not offset <= at < offset + len(data):
            return data
        changed = bytearray(data)
        changed[at - offset] ^= 1 << bit
        return bytes(changed)

    return edit


def cut(at: int) -> Edit:
    """Return an edit that drops the bytes from an offset on, and with the first of them closes the connection."""

    def edit(offset: int, data: bytes) -> bytes:
        return data[: max(0, at - offset)]

    return edit


class TcpRelay:
    """Relays connections to a server."""

    def __init__(self, target: tuple[str, int], host: str, port: int, to_client: Edit, to_server: Edit) -> None:
        self._target = target
        self._edits = {True: to_client, False: to_server}
        self._listener = socket.create_server((host, port))
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self.to_client: list[bytearray] = []
        """Bytes of the server in each connection, before they were edited."""
        self.to_server: list[bytearray] = []
        """Bytes of the client in each connection, before they were edited."""
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def seen(self) -> bytes:
        """Bytes of all connections and directions."""
        return b"".join((*self.to_client, *self.to_server))

    def close(self) -> None:
        """End all connections."""
        self._ends.set()
        for thread in list(self._threads):
            thread.join(_JOIN_SECONDS)
        self._listener.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        self._listener.settimeout(_TICK_SECONDS)
        while not self._ends.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target, _JOIN_SECONDS)
                except OSError:
                    client.close()
                    continue
                for link in (client, server):
                    link.settimeout(_TICK_SECONDS)
                self.to_client.append(bytearray())
                self.to_server.append(bytearray())
                ended = threading.Event()
                self._start(self._carry, server, client, self.to_client[-1], self._edits[True], ended)
                self._start(self._carry, client, server, self.to_server[-1], self._edits[False], ended)

    def _carry(
        self, source: socket.socket, sink: socket.socket, seen: bytearray, edit: Edit, ended: threading.Event
    ) -> None:
        """Relay one direction until one of the two directions ends."""
        try:
            while not (self._ends.is_set() or ended.is_set()):
                try:
                    data = source.recv(1 << 16)
                except TimeoutError:
                    continue
                if not data:
                    return
                offset = len(seen)
                seen += data
                edited = edit(offset, data)
                self._send(sink, edited)
                if len(edited) < len(data):
                    return
        except OSError:
            return
        finally:
            ended.set()
            source.close()
            sink.close()

    def _send(self, sink: socket.socket, data: bytes) -> None:
        left = memoryview(data)
        while left and not self._ends.is_set():
            with suppress(TimeoutError):
                left = left[sink.send(left) :]


@contextmanager
def tcp_relay(
    target: tuple[str, int],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    to_client: Edit = as_they_are,
    to_server: Edit = as_they_are,
) -> Iterator[TcpRelay]:
    """Yield a relay to the server at `target`, closed at the end of the `with` block.

    Args:
        target: address of the server.
        host: address on which the relay listens.
        port: port on which it listens; 0 for a free one.
        to_client: edits the bytes of the server.
        to_server: edits the bytes of the clients.
    """
    made = TcpRelay(target, host, port, to_client, to_server)
    try:
        yield made
    finally:
        made.close()
