"""A relay between Redis clients and server that can stall connections or flip bits, and a server with scripted
replies."""

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

_JOIN_SECONDS = 10.0
_TICK_SECONDS = 0.02
_VALUE_BYTES = 1024
"""Size in bytes above which a chunk contains part of a value."""


class Relay:
    """Relays TCP connections on `port` to a Unix socket."""

    def __init__(self, target: str) -> None:
        self.target = target
        """Path of the Unix socket for new connections."""
        self.flips = False
        """Whether a bit of every chunk of a value is flipped."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._stalled: set[int] = set()
        """Numbers of the stalled connections, counted from 0 in the order of acceptance."""
        self._ends = threading.Event()
        self.num_accepted = 0
        self.ended: set[int] = set()
        """Numbers of the connections that the client or the server has closed."""
        self.used_last = -1
        """Number of the connection on which a client sent data last; -1 if there was none yet."""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stall(self, number: int) -> None:
        """Stop relaying replies of this connection."""
        self._stalled.add(number)

    def close(self) -> None:
        """Close all connections."""
        self._ends.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(_TICK_SECONDS)
        while not self._ends.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._carry, args=(client, self.num_accepted), daemon=True)
                self.num_accepted += 1
                self._threads.append(thread)
                thread.start()

    def _carry(self, client: socket.socket, number: int) -> None:
        with ExitStack() as stack:
            stack.enter_context(client)
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                server.connect(self.target)
            except OSError:  # no server: close the client's connection
                return
            watched = stack.enter_context(selectors.DefaultSelector())
            watched.register(client, selectors.EVENT_READ, server)
            watched.register(server, selectors.EVENT_READ, client)
            while not self._ends.is_set():
                for key, _ in watched.select(_TICK_SECONDS):
                    if key.fileobj is server and number in self._stalled:
                        self._ends.wait(_TICK_SECONDS)
                        continue
                    if key.fileobj is client:
                        self.used_last = number
                    try:
                        data = (server if key.fileobj is server else client).recv(1 << 16)
                        if self.flips and key.fileobj is server and len(data) >= _VALUE_BYTES:
                            middle = len(data) // 2
                            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                        key.data.sendall(data)
                    except OSError:
                        data = b""
                    if not data:
                        self.ended.add(number)
                        return


@contextmanager
def relay(target: str) -> Iterator[Relay]:
    """Yield a relay to the Unix socket `target`, closed at the end of the `with` block."""
    made = Relay(target)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def scripted(answer: Callable[[bytes], bytes], *, piece: int = 1 << 30) -> Iterator[int]:
    """Run a server that replies with `answer(received bytes)`, or disconnects if this is empty; yield its port.

    Args:
        piece: number of bytes per write; writes are separated by a short pause.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ends = threading.Event()

    def serve() -> None:
        listener.settimeout(_TICK_SECONDS)
        while not ends.is_set():
            with suppress(OSError):
                client, _ = listener.accept()
                threads.append(threading.Thread(target=attend, args=(client,), daemon=True))
                threads[-1].start()

    def attend(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(_TICK_SECONDS)
            while not ends.is_set():
                with suppress(TimeoutError):
                    command = client.recv(1 << 16)
                    reply = answer(command) if command else b""
                    if not reply:
                        return
                    client.settimeout(_JOIN_SECONDS)
                    for at in range(0, len(reply), piece):
                        client.sendall(reply[at : at + piece])
                        if len(reply) > piece and ends.wait(_TICK_SECONDS):
                            return
                    client.settimeout(_TICK_SECONDS)

    threads = [threading.Thread(target=serve, daemon=True)]
    threads[0].start()
    try:
        yield listener.getsockname()[1]
    finally:
        ends.set()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
        listener.close()
