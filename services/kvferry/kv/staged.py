"""Reading pages of another layout: piece by piece into staging, and from there, converted, into the pages.

    peer's pages --transport--> staging, one piece --convert--> target pages        and again, until all are here

Pieces are converted before the epochs are known, so that staging is bounded whatever the prompt's length. That is as
safe as a raw read into the pages: until the outcome says that the epochs were the promised ones, the targets count a
writer and no index lists them. All source blocks are verified together, after the last piece.

A place in staging belongs to one job from before its read begins until the transport is quiet; then it is lent again.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.core.ids import BlockId
from kvferry.kv.connector import Peer, Read, ReadError, Transport
from kvferry.kv.relayout import DoesNotFit, Relayout


class StagingPlaces:
    """Lends places in a transport's staging memory; the only owner of it. Safe to use from several threads."""

    def __init__(self, make: Callable[[int], memoryview], place_bytes: int, most: int) -> None:
        """
        Args:
            make: `Transport.staging`; asked for a place when it is first needed.
            most: places that there may ever be. More than run at a time, because a stalled read keeps its own.
        """
        self.place_bytes = place_bytes
        self._make = make
        self._most = most
        self._free: list[memoryview] = []
        self._num_made = 0
        self._lock = threading.Lock()  # guards _free and _num_made; memory is made outside

    @property
    def num_lent(self) -> int:
        """Places that somebody has."""
        with self._lock:
            return self._num_made - len(self._free)

    def take(self) -> memoryview:
        """A place that nobody else has.

        Raises:
            ReadError: stalled reads have them all.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_made == self._most:
                raise ReadError(f"all {self._most} places in staging wait for reads that stalled")
            self._num_made += 1
        try:
            return self._make(self.place_bytes)
        except BaseException:
            with self._lock:
                self._num_made -= 1
            raise

    def give_back(self, place: memoryview) -> None:
        """Nothing writes it any more."""
        with self._lock:
            self._free.append(place)


class StagedRead:
    """A read that converts: over when the last piece is in the target pages. Polled by one thread."""

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
    ) -> None:
        """
        Args:
            blocks: of the source, by position in a prompt of `num_tokens` tokens.
            start: begins to read some of them side by side into memory of exactly their size.
            place: of staging.
            pages: all of ours.
            first: position of our block that goes into `local[0]`.

        Raises:
            ReadError: the place is too small, or the first piece cannot be read.
        """
        self._relayout, self._num_tokens = relayout, num_tokens
        self._start, self._place = start, place
        self._targets = np.frombuffer(pages, np.uint8).reshape(-1, relayout.target.block_bytes)
        self._first, self._local = first, list(local)
        self._num_done = 0
        try:
            self._pieces = relayout.pieces(blocks, len(place))
        except ValueError as error:
            raise ReadError(str(error)) from error
        self._part = self._next()

    def poll(self) -> bool:
        if not self._part.poll():
            return False
        piece = self._pieces[self._num_done]
        try:
            self._relayout.convert(
                self._memory(piece), piece, self._targets, self._local, self._first, self._num_tokens
            )
        except DoesNotFit as error:
            raise ReadError(str(error)) from error
        self._num_done += 1
        if self._num_done == len(self._pieces):
            return True
        self._part = self._next()
        return False

    def is_quiet(self) -> bool:
        # What we write ourselves is written inside `poll`, by whoever asks.
        return self._part.is_quiet()

    def wait(self, seconds: float) -> None:
        self._part.wait(seconds)

    def progress(self) -> int:
        """Pieces that are in the target pages."""
        return self._num_done

    def _next(self) -> Read:
        piece = self._pieces[self._num_done]
        return self._start(piece, self._memory(piece))

    def _memory(self, piece: range) -> memoryview:
        return self._place[: len(piece) * self._relayout.source.block_bytes]


def raw_reader(
    transport: Transport, peer: Peer, blocks: range, remote: Sequence[int]
) -> Callable[[range, memoryview], Read]:
    """`start` for a `StagedRead` over a transport; `remote[i]` is the peer's page with the i-th of `blocks`."""

    def start(piece: range, into: memoryview) -> Read:
        ids = remote[piece.start - blocks.start : piece.stop - blocks.start]
        return transport.read_raw(peer, ids, into)

    return start
