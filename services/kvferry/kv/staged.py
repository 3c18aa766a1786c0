"""Staged KV reads: pages of a different layout are read piece by piece into staging memory and converted into pages.

    peer's pages --transport--> staging, one piece --convert--> target pages        repeated until all are converted

Pieces are converted before the epochs are verified, so that the size of staging memory does not depend on the prompt's
length. This is as safe as a direct read into the pages: until the epochs are verified, the target pages count a writer
and are not in the prefix index. The epochs of all source blocks are verified together, after the last piece.

A staging slot belongs to one job from before the job's read starts until the transport is quiet; then it is reused.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.core.ids import BlockId
from kvferry.kv.interface.connector import Peer, Read, ReadError, Transport
from kvferry.kv.pages.digests import page_digests
from kvferry.kv.pages.relayout import DtypeOverflow, Relayout


class StagingSlots:
    """Pool of equally sized slots in a transport's staging memory, which nothing else uses. Thread-safe."""

    def __init__(self, make: Callable[[int], memoryview], slot_bytes: int, max_slots: int) -> None:
        """
        Args:
            make: allocates a slot (`Transport.staging`) when it is first needed.
            slot_bytes: size of each slot.
            max_slots: maximum number of slots; should exceed the number of parallel reads, because a stalled read keeps
                its slot.
        """
        self.slot_bytes = slot_bytes
        self._make = make
        self._max_slots = max_slots
        self._free: list[memoryview] = []
        self._num_made = 0
        self._lock = threading.Lock()  # guards _free and _num_made; not held during allocation

    @property
    def num_lent(self) -> int:
        """Number of slots in use."""
        with self._lock:
            return self._num_made - len(self._free)

    def take(self) -> memoryview:
        """Take a free slot.

        Raises:
            ReadError: stalled reads hold all slots.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_made == self._max_slots:
                raise ReadError(f"all {self._max_slots} staging slots are held by stalled reads")
            self._num_made += 1
        try:
            return self._make(self.slot_bytes)
        except BaseException:
            with self._lock:
                self._num_made -= 1
            raise

    def give_back(self, place: memoryview) -> None:
        """Return a slot to the pool; the transport must no longer write to it."""
        with self._lock:
            self._free.append(place)


class StagedRead:
    """A read with layout conversion. It is complete when the last piece is in the target pages. Polled by one
    thread."""

    def __init__(
        self,
        relayout: Relayout,
        blocks: range,
        num_tokens: int,
        *,
        start: Callable[[range, memoryview], Read],
        place: memoryview,
        pages: memoryview,
        first: int,
        local: Sequence[BlockId],
        digests: Sequence[bytes] = (),
    ) -> None:
        """
        Args:
            relayout: the conversion plan from the peer's layout to this worker's layout.
            blocks: positions of the source blocks in the prompt.
            num_tokens: number of tokens of the prompt; the last block may be partly filled.
            start: starts a read of a range of source blocks, contiguously into memory of exactly their size.
            place: the staging slot.
            pages: all pages of this worker.
            first: position in the prompt of the target block that is written to `local[0]`.
            local: target pages, in order of position.
            digests: digests of the source blocks, verified before a piece is converted; empty to skip verification.

        Raises:
            ReadError: the slot is too small, or the first piece cannot be read.
        """
        self._relayout, self._num_tokens = relayout, num_tokens
        self._start, self._place = start, place
        self._targets = np.frombuffer(pages, np.uint8).reshape(-1, relayout.target.block_bytes)
        self._first, self._local = first, list(local)
        self._blocks, self._digests = blocks, list(digests)
        self._num_done = 0
        try:
            self._pieces = relayout.pieces(blocks, len(place))
        except ValueError as error:
            raise ReadError(str(error)) from error
        self._part = self._next()

    def poll(self) -> bool:
        """See `Read.poll`.

        Raises:
            ReadError: the read failed, a digest does not match, or a value does not fit the local data type.
        """
        if not self._part.poll():
            return False
        piece = self._pieces[self._num_done]
        self._check_digests(piece)
        try:
            self._relayout.convert(
                self._memory(piece), piece, self._targets, self._local, self._first, self._num_tokens
            )
        except DtypeOverflow as error:
            raise ReadError(str(error)) from error
        self._num_done += 1
        if self._num_done == len(self._pieces):
            return True
        self._part = self._next()
        return False

    def is_quiet(self) -> bool:
        # The conversion writes to the target pages inside `poll`; only the transport writes in the background.
        return self._part.is_quiet()

    def wait(self, seconds: float) -> None:
        self._part.wait(seconds)

    def progress(self) -> int:
        """Return the number of pieces that have been converted into the target pages."""
        return self._num_done

    def _next(self) -> Read:
        piece = self._pieces[self._num_done]
        return self._start(piece, self._memory(piece))

    def _check_digests(self, piece: range) -> None:
        if not self._digests:
            return
        found = page_digests(self._memory(piece), self._relayout.source.block_bytes, range(len(piece)))
        if list(found) != self._digests[piece.start - self._blocks.start : piece.stop - self._blocks.start]:
            raise ReadError("the data was corrupted in transit from the peer")

    def _memory(self, piece: range) -> memoryview:
        return self._place[: len(piece) * self._relayout.source.block_bytes]


def raw_reader(
    transport: Transport, peer: Peer, blocks: range, remote: Sequence[int]
) -> Callable[[range, memoryview], Read]:
    """Create the `start` function of a `StagedRead`.

    Args:
        transport: transport with a connection to the peer.
        peer: the worker that has the blocks.
        blocks: positions of the source blocks in the prompt.
        remote: the peer's page of each of `blocks`.
    """

    def start(piece: range, into: memoryview) -> Read:
        ids = remote[piece.start - blocks.start : piece.stop - blocks.start]
        return transport.read_raw(peer, ids, into)

    return start
