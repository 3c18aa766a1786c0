"""Page server of connector `tcp`: authenticates readers and sends pages and epochs from their memory, directly
or encrypted.

Each connection has a thread. Time-outs apply only within a request, because readers keep their connections open between
hand-offs.
"""

import logging
import socket
import threading
from collections.abc import Sequence

from kvferry.core.clock import Clock
from kvferry.core.epochs import EpochTable
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.tcp_framing import PLAIN, ByteLink, Framing

_log = logging.getLogger(__name__)

_GREETING_SECONDS = 2.0
_STALL_SECONDS = 5.0
"""Time without accepted data after which a reader is disconnected."""
_MAX_CONNECTIONS = 512
_ACCEPT_PAUSE_SECONDS = 0.1
_BACKLOG = 128


class PageServer:
    """Server for one worker's pages."""

    def __init__(
        self,
        host: str,
        pages: memoryview,
        epochs: EpochTable,
        block_bytes: int,
        keys: Sequence[bytes],
        clock: Clock,
        framing: Framing = PLAIN,
    ) -> None:
        """
        Args:
            host: address to listen on; the port is chosen by the kernel.
            pages: memory of the pages.
            epochs: epoch of each page.
            block_bytes: bytes of one page.
            keys: keys of the pool for this framing; a reader authenticates with any of them.
            clock: measures the time of handshakes.
            framing: framing of the connections.

        Raises:
            OSError: the address cannot be bound.
        """
        self._pages, self._epochs, self._block_bytes = pages, epochs, block_bytes
        self._keys = tuple(keys)
        self._clock = clock
        self._framing = framing
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._links: set[socket.socket] = set()
        self._lock = threading.Lock()  # guards _links and _closed; not held during blocking calls
        self._closed = False
        self._ended = threading.Event()
        threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True).start()

    def close(self) -> None:
        """Close the listener and all connections, without waiting for the threads, which only read pages.
        Idempotent."""
        self._ended.set()
        with self._lock:
            self._closed = True
            links = [self._listener, *self._links]
        for link in links:
            _cut(link)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if not self._ended.is_set():  # too many open files, for example: keep accepting readers
                    _log.warning("cannot accept a reader's connection: %s", error)
                    self._ended.wait(_ACCEPT_PAUSE_SECONDS)
                continue
            with self._lock:
                taken = not self._closed and len(self._links) < _MAX_CONNECTIONS
                if taken:
                    self._links.add(link)
            if not taken or not self._start(link):
                with self._lock:
                    self._links.discard(link)
                link.close()

    def _start(self, link: socket.socket) -> bool:
        try:
            threading.Thread(target=self._serve, args=(link,), name="kv-tcp-serve", daemon=True).start()
        except RuntimeError as error:
            _log.warning("cannot serve a reader: %s", error)
            return False
        return True

    def _serve(self, link: socket.socket) -> None:
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(_GREETING_SECONDS)
            opened = wire.greet_as_owner(link, self._keys, self._clock, _GREETING_SECONDS, self._framing)
            wire.block_in_kernel(link, _STALL_SECONDS)
            requests = wire.Requests(opened, len(self._epochs))
            while (request := requests.receive()) is not None:
                self._answer(opened, *request)
        except BlockingIOError:
            _log.info("disconnected a reader: it stalled for %.0f s", _STALL_SECONDS)
        except OSError as error:  # includes time-outs, `WireError` and `SealError`
            if not self._closed:
                _log.info("disconnected a reader: %s", error)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _answer(self, link: ByteLink, op: wire.Op, ids: Sequence[int]) -> None:
        if max(ids) >= len(self._epochs):
            wire.send_refusal(link)
        elif op is wire.Op.EPOCHS:
            wire.send_epochs(link, [self._epochs[i] for i in ids])
        else:
            size = self._block_bytes
            wire.send_reply(link, [self._pages[a * size : b * size] for a, b in runs(ids)])


def runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Merge consecutive ids into half-open ranges: [3, 4, 5, 9] becomes (3, 6), (9, 10)."""
    found: list[tuple[int, int]] = []
    for i in ids:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found


def _cut(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:  # the socket is no longer connected
        return
