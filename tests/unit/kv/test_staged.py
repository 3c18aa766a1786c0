"""Staged reads and their slots: bounded, never shared, never reused while a transport may write to them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.ids import BlockId, Incarnation, WorkerId
from kvferry.kv.connectors.windows import CompletedRead
from kvferry.kv.interface.connector import MeasuredRead, Peer, ReadError
from kvferry.kv.pages.digests import page_digests
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import plan
from kvferry.kv.staged import StagedRead, StagingSlots, raw_reader

THEIRS = KvLayout("digest", "float32", 1, 1, 2, 2)
OURS = replace(THEIRS, block_tokens=3)
PEER = Peer(WorkerId("w"), Incarnation("i"), "peer:1")


class Slow:
    """A peer whose block i has the value i + 1 in every element; a read of a block ends at its second poll."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.fail_at = -1
        self.value = 0.0

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> "SlowRead":
        if len(self.asked) == self.fail_at:
            raise ReadError("broken wire")
        assert peer is PEER
        self.asked.append(list(remote))
        return SlowRead(remote, into, self.value)


class SlowRead(CompletedRead):
    def __init__(self, remote: Sequence[int], into: memoryview, value: float) -> None:
        self.remote, self.into, self.value, self.polls = remote, into, value, 0

    def poll(self) -> bool:
        self.polls += 1
        if self.polls == 2:
            page = np.frombuffer(self.into, np.float32).reshape(len(self.remote), -1)
            page[:] = np.asarray(self.remote, np.float32)[:, None] + 1 + self.value
        return self.polls >= 2

    def is_quiet(self) -> bool:
        return self.polls >= 2


def a_read(
    transport: Slow, *, place: int, pages: memoryview, ours: KvLayout = OURS, digests: Sequence[bytes] = ()
) -> StagedRead:
    """Return a read of our blocks 1 and 2 of a prompt of 8 tokens into pages 3 and 0: tokens 3 to 7, in the peer's
    blocks 1 to 3.
    """
    relayout = plan(THEIRS, ours)
    blocks = relayout.source_blocks(1, 2, 8)
    assert blocks == range(1, 4)
    return StagedRead(
        relayout,
        blocks,
        8,
        start=raw_reader(transport, PEER, blocks, [11, 12, 13]),  # type: ignore[arg-type]
        place=memoryview(bytearray(place)),
        pages=pages,
        first=1,
        local=[BlockId(3), BlockId(0)],
        digests=digests,
    )


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        (THEIRS.block_bytes, [[11], [12], [13]]),
        (2 * THEIRS.block_bytes + 1, [[11, 12], [13]]),
        (9 * THEIRS.block_bytes, [[11, 12, 13]]),
    ],
)
def test_a_prompt_comes_in_pieces_that_fit_its_place(place: int, asked: list[list[int]]) -> None:
    transport, pages = Slow(), bytearray(4 * OURS.block_bytes)
    read = a_read(transport, place=place, pages=memoryview(pages))
    assert isinstance(read, MeasuredRead)
    seen = []
    while not read.poll():
        seen.append((read.progress(), read.is_quiet()))
        read.wait(0.0)
    assert transport.asked == asked
    assert seen[0] == (0, False)
    assert (read.progress(), read.is_quiet()) == (len(asked), True)
    found = np.frombuffer(pages, np.float32).reshape(4, 2, 3, 2)  # pages, K and V, tokens, dim
    assert found[3, :, :, 0].tolist() == [[12, 13, 13]] * 2
    assert found[0, :, :, 1].tolist() == [[14, 14, 0]] * 2, "the prompt ends after its 8th token"
    assert not found[1:3].any()


@pytest.mark.parametrize("place", [THEIRS.block_bytes, 9 * THEIRS.block_bytes])
def test_pieces_are_converted_only_if_they_have_their_digests(place: int) -> None:
    def until_done(digests: Sequence[bytes]) -> bool:
        read = a_read(Slow(), place=place, pages=memoryview(bytearray(4 * OURS.block_bytes)), digests=digests)
        for _ in range(100):
            if read.poll():
                return True
        raise AssertionError("never done")

    values = [np.full(THEIRS.block_bytes // 4, value, np.float32).tobytes() for value in (12, 13, 14)]
    good = [page_digests(memoryview(value), THEIRS.block_bytes, [0])[0] for value in values]
    assert until_done(good)
    with pytest.raises(ReadError, match="corrupted"):
        until_done([*good[:2], good[0]])


def test_a_page_larger_than_a_slot_is_an_error() -> None:
    with pytest.raises(ReadError, match=f"has {THEIRS.block_bytes} bytes"):
        a_read(Slow(), place=THEIRS.block_bytes - 1, pages=memoryview(bytearray(4 * OURS.block_bytes)))


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_piece_that_cannot_be_read_ends_the_read_which_is_quiet_then(fail_at: int) -> None:
    transport = Slow()
    transport.fail_at = fail_at
    pages = memoryview(bytearray(4 * OURS.block_bytes))
    if fail_at == 0:
        with pytest.raises(ReadError, match="broken wire"):
            a_read(transport, place=THEIRS.block_bytes, pages=pages)
        return
    read = a_read(transport, place=THEIRS.block_bytes, pages=pages)
    assert not read.poll()
    with pytest.raises(ReadError, match="broken wire"):
        read.poll()
    assert read.is_quiet()


def test_a_value_that_does_not_fit_ends_the_read() -> None:
    transport, ours = Slow(), replace(OURS, dtype="float16")
    transport.value = 1e6
    read = a_read(transport, place=1 << 10, pages=memoryview(bytearray(4 * ours.block_bytes)), ours=ours)
    assert not read.poll()
    with pytest.raises(ReadError, match="values outside the range of float16"):
        read.poll()


def test_places_are_allocated_on_demand_lent_once_and_bounded() -> None:
    made: list[int] = []

    def make(size: int) -> memoryview:
        made.append(size)
        return memoryview(bytearray(size))

    places = StagingSlots(make, 64, 2)
    assert made == []
    one, other = places.take(), places.take()
    assert one is not other
    assert (made, places.num_lent) == ([64, 64], 2)
    with pytest.raises(ReadError, match="all 2 staging slots"):
        places.take()
    places.give_back(one)
    assert places.take() is one
    assert made == [64, 64]
    places.give_back(one)
    places.give_back(other)
    assert places.num_lent == 0


def test_a_place_that_could_not_be_made_is_not_counted() -> None:
    def fails(size: int) -> memoryview:
        raise OSError("no memory")

    places = StagingSlots(fails, 64, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            places.take()
    assert places.num_lent == 0
