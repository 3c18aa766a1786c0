"""Reads over connector `tcp`, received by the thread that polls them.

A thread for each read would cost two switches, which is more than the transfer of a single page over loopback. Parts of
a large read have threads, since their copies then run in parallel.
"""

import socket
from collections.abc import Sequence
from concurrent.futures import Executor, wait
from typing import Protocol

from kvferry.core.clock import Clock
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.tcp_framing import ByteLink, SealError
from kvferry.kv.interface.connector import ReadError

_WAIT_SECONDS = 0.1


class Links(Protocol):
    """Connections to one peer."""

    def take(self, timeout: float) -> ByteLink:
        """Return a connection for one exchange.

        Raises:
            OSError: a connection cannot be opened within `timeout` seconds.
        """
        ...

    def give_back(self, link: ByteLink) -> None:
        """Return a connection after a complete exchange."""
        ...


class TcpRead:
    """A read in flight. Only `poll`, `is_quiet` and `wait` write to the target pages, on the thread that calls them."""

    def __init__(
        self,
        links: Links,
        op: wire.Op,
        ids: Sequence[int],
        into: Sequence[memoryview],
        *,
        connect_seconds: float,
        stall_seconds: float,
        total_seconds: float,
        clock: Clock,
    ) -> None:
        """Send the request for pages `ids` or their epochs, which go to the buffers `into` in order.

        Args:
            links: connections to the peer.
            op: kind of read, pages or epochs.
            ids: the peer's pages; not empty.
            into: target buffers.
            connect_seconds: time limit of opening a connection.
            stall_seconds: time without data after which the read fails.
            total_seconds: time after which the read fails.
            clock: clock of both times.

        Raises:
            ReadError: the peer cannot be reached.
        """
        self._links, self._op, self._ids = links, op, ids
        self._connect_seconds = connect_seconds
        self._stall_seconds = stall_seconds
        self._clock = clock
        now = clock.monotonic()
        self._total_seconds = total_seconds
        self._deadline, self._last_arrival = now + total_seconds, now
        self._link: ByteLink | None = None
        self._failure: str | None = None
        self._may_retry = True
        try:
            self._request()
        except OSError as error:
            raise ReadError(f"the read failed ({error})") from error
        self._reply = wire.IncomingReply(into)  # made while the peer receives the request

    def poll(self) -> bool:
        """See `Read.poll`.

        Raises:
            ReadError: the connection failed, or a time limit passed.
        """
        self._receive(socket.MSG_DONTWAIT)
        if self._failure is not None:
            raise ReadError(f"the read failed ({self._failure})")
        return self._link is None

    def is_quiet(self) -> bool:
        self._receive(socket.MSG_DONTWAIT)
        return self._link is None

    def progress(self) -> int:
        """Return the number of bytes received."""
        return self._reply.num_received

    def wait(self, seconds: float) -> None:
        """Receive until the reply is complete, for at most `seconds` (rounded up to a tick of the kernel's timer) or
        8 MiB. The call waits in the kernel between parts of the reply, without the interpreter."""
        if self._link is not None:
            wire.limit_receives(self._link, seconds)
            self._receive(socket.MSG_WAITALL)

    def _request(self) -> None:
        """Send the request; retry once, since the peer may have closed an idle connection."""
        link = self._links.take(self._connect_seconds)
        try:
            wire.send_request(link, self._op, self._ids, self._stall_seconds)
        except OSError:
            link.close()
            if not self._may_retry:
                raise
            self._may_retry = False
            self._request()
        else:
            self._link = link

    def _receive(self, flags: int) -> None:
        """Receive once; end the read when it is complete or has failed."""
        if self._link is None:
            return
        before = self._reply.num_received
        try:
            if self._reply.receive_some(self._link, flags):
                self._links.give_back(self._link)
                self._link = None
                return
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(error)
            return
        now = self._clock.monotonic()
        if self._reply.num_received > before:
            self._last_arrival = now
        if now - self._last_arrival > self._stall_seconds:
            self._fail(f"no data arrived for {self._stall_seconds:g} s")
        elif now > self._deadline:
            self._fail(f"it took longer than {self._total_seconds:.0f} s")

    def _lose(self, error: OSError) -> None:
        """End the exchange after an error of the connection; repeat it if the peer had closed an idle connection."""
        self._fail(str(error))
        if self._may_retry and self._reply.num_received == 0 and not isinstance(error, SealError):
            self._may_retry = False
            try:
                self._request()
            except OSError as again:
                self._fail(str(again))
            else:
                self._failure = None

    def _fail(self, why: str) -> None:
        self._failure = why
        if self._link is not None:
            self._link.close()
            self._link = None


class ParallelRead:
    """Reads of the parts of a large read, each received by a thread."""

    def __init__(self, parts: Sequence[TcpRead], threads: Executor) -> None:
        """
        Args:
            parts: reads of the parts, each with its own connection.
            threads: executor that runs the receiving threads.
        """
        self._reads = list(parts)
        self._ends = [threads.submit(_receive_all, part) for part in parts]

    def poll(self) -> bool:
        """See `Read.poll`.

        Raises:
            ReadError: one of the parts failed.
        """
        for end in self._ends:
            if end.done() and (error := end.exception()) is not None:
                raise ReadError(str(error)) from error
        return self.is_quiet()

    def is_quiet(self) -> bool:
        return all(end.done() for end in self._ends)

    def progress(self) -> int:
        """Return the number of bytes received."""
        return sum(read.progress() for read in self._reads)

    def wait(self, seconds: float) -> None:
        wait(self._ends, seconds)


def _receive_all(read: TcpRead) -> None:
    while not read.poll():
        read.wait(_WAIT_SECONDS)


def split_buffers(buffers: Sequence[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first `size` bytes of buffers, and the rest.

    Args:
        buffers: the buffers, as bytes.
        size: number of bytes, at most the length of all buffers.
    """
    first: list[memoryview] = []
    for number, buffer in enumerate(buffers):
        if size < len(buffer):
            return [*first, *([buffer[:size]] if size else [])], [buffer[size:], *buffers[number + 1 :]]
        first.append(buffer)
        size -= len(buffer)
    return first, []
