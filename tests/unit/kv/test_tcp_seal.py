"""Records of encrypted connections however the network divides them, and altered, repeated or missing ones."""

import socket
import struct
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.kv.connectors import tcp_seal
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.tcp_framing import SealError
from kvferry.kv.connectors.tcp_seal import OVERHEAD, SealedLink, is_spent

ONE, OTHER = bytes(range(32)), bytes(range(1, 33))
SMALL = 16
"""Maximum content of a record in most tests."""
Cuts = st.lists(st.integers(1, 200), max_size=60)
Parts = st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6)


class Raw:
    """A socket on which bytes have arrived in parts of given sizes, and that records what is sent."""

    def __init__(self, data: bytes = b"", cuts: Sequence[int] = (), *, is_open: bool = False) -> None:
        self.parts: list[bytes] = []
        for size in cuts:
            self.parts.append(data[:size])
            data = data[size:]
        self.parts = [part for part in (*self.parts, data) if part]
        self.is_open = is_open
        self.sent = bytearray()
        self.asked: list[int] = []

    def recv_into(self, into: memoryview, size: int, flags: int) -> int:
        self.asked.append(size)
        if not self.parts:
            if self.is_open:
                raise BlockingIOError
            return 0
        part = self.parts.pop(0)
        if part[size:]:
            self.parts.insert(0, part[size:])
        found = part[:size]
        into[: len(found)] = found
        return len(found)

    def sendall(self, data: memoryview) -> None:
        self.sent += data


def linked(raw: Raw, sending: bytes = ONE, receiving: bytes = OTHER) -> SealedLink:
    return SealedLink(cast(socket.socket, raw), sending, receiving)


def records_of(*messages: bytes) -> list[bytes]:
    """Return the records in which one side sends messages."""
    raw = Raw()
    link = linked(raw, sending=ONE)
    found = []
    for message in messages:
        link.sendall(message)
    data = bytes(raw.sent)
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[: OVERHEAD + length])
        data = data[OVERHEAD + length :]
    return found


def receiver(data: bytes, cuts: Sequence[int] = (), *, is_open: bool = False) -> SealedLink:
    return linked(Raw(data, cuts, is_open=is_open), sending=OTHER, receiving=ONE)


@pytest.fixture(autouse=True)
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_seal, "RECORD_BYTES", SMALL)
    monkeypatch.setattr(tcp_seal, "_WINDOW_BYTES", 4 * (SMALL + OVERHEAD))


def receive_all(link: SealedLink, into: Sequence[memoryview], flags: int) -> None:
    """Fill buffers as a reader does, which passes all that are left."""
    left = list(into)
    while left:
        try:
            (received,) = link.recvmsg_into(left, 0, flags)
        except BlockingIOError:
            continue
        assert received, "the connection was closed"
        left = wire._advance(left, received)


@settings(deadline=None)
@given(Parts, Parts, Cuts, st.sampled_from([0, socket.MSG_DONTWAIT, socket.MSG_WAITALL]))
def test_content_arrives_alike_however_it_is_divided(
    sent: list[bytes], places: list[bytes], cuts: list[int], flags: int
) -> None:
    """Buffers of the two sides have other sizes, as runs of pages have."""
    content = b"".join(sent)
    raw = Raw()
    link, left = linked(raw, sending=ONE), [memoryview(part) for part in sent]
    while left:
        left = wire._advance(left, link.sendmsg(left))
    sizes, taken = [len(place) for place in places], 0
    into = [bytearray(min(size, max(0, len(content) - sum(sizes[:i])))) for i, size in enumerate(sizes)]
    into = [place for place in into if place]
    taken = sum(map(len, into))
    ours = receiver(bytes(raw.sent), cuts)
    receive_all(ours, [memoryview(place) for place in into], flags)
    assert b"".join(into) == content[:taken]
    rest = b""
    while more := ours.recv(7):
        rest += more
    assert rest == content[taken:]
    assert content not in raw.sent or len(content) < 4


@settings(deadline=None)
@given(st.binary(min_size=40, max_size=200), st.data())
def test_a_changed_bit_anywhere_delivers_nothing_of_its_record(content: bytes, data: st.DataObject) -> None:
    records = records_of(content)
    number = data.draw(st.integers(0, len(records) - 1))
    at = data.draw(st.integers(0, len(records[number]) - 1))
    changed = bytearray(records[number])
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    records[number] = bytes(changed)
    place = bytearray(b"." * len(content))
    with pytest.raises(SealError):
        receive_all(receiver(b"".join(records)), [memoryview(place)], 0)
    assert bytes(place[: number * SMALL]) == content[: number * SMALL]
    assert set(place[number * SMALL :]) <= {0, ord(".")}, "no byte of the record is in the buffer"


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "repeated": lambda r: [r[0], r[0], *r[1:]],
    "in another order": lambda r: [r[1], r[0], *r[2:]],
    "left out": lambda r: [r[0], *r[2:]],
    "of another key": lambda r: r,
}


@pytest.mark.parametrize("change", CHANGES)
def test_records_that_are_not_the_next_ones_are_refused(change: str) -> None:
    records = CHANGES[change](records_of(bytes(range(64))))
    raw = Raw(b"".join(records))
    ours = linked(raw, receiving=OTHER if change == "of another key" else ONE)
    place = bytearray(64)
    with pytest.raises(SealError, match="altered, repeated or reordered, or made with another key"):
        receive_all(ours, [memoryview(place)], 0)
    done = 0 if change in ("in another order", "of another key") else SMALL
    assert place == bytes(range(done)) + bytes(64 - done)


def test_a_record_of_the_own_direction_is_refused() -> None:
    ours = linked(Raw(b"".join(records_of(b"sent by us"))), sending=ONE, receiving=OTHER)
    with pytest.raises(SealError, match="altered"):
        ours.recv(10)


@pytest.mark.parametrize("size", [1, 47, 48, 63, OVERHEAD + 1, OVERHEAD + SMALL - 1])
def test_a_connection_that_ends_within_a_record_is_an_error(size: int) -> None:
    (record,) = records_of(b"x" * SMALL)
    with pytest.raises(SealError, match="closed the connection within a record"):
        receive_all(receiver(record[:size]), [memoryview(bytearray(SMALL))], 0)


def test_a_connection_that_ends_between_records_has_ended() -> None:
    ours = receiver(b"".join(records_of(b"a" * SMALL)))
    assert ours.recv(100) == b"a" * SMALL
    assert ours.recv(100) == b""
    assert ours.recvmsg_into([memoryview(bytearray(4))], 0, 0) == (0,)


@pytest.mark.parametrize("length", [0, SMALL + 1, 2**32 - 1])
def test_a_record_of_no_or_too_many_bytes_is_refused_before_it_arrives(length: int) -> None:
    with pytest.raises(SealError, match=f"a record has {length} bytes; expected 1 to {SMALL}"):
        receiver(struct.pack("<I60x", length), is_open=True).recv(1)


def test_a_record_that_stalls_is_told_from_an_idle_connection() -> None:
    (record,) = records_of(b"x" * SMALL)
    with pytest.raises(BlockingIOError):
        receiver(b"", is_open=True).recv(1)
    with pytest.raises(TimeoutError, match="record did not arrive"):
        receiver(record[:-1], is_open=True).recv(1)


def test_no_wait_is_for_more_than_the_wanted_content() -> None:
    """With `MSG_WAITALL` the kernel waits for every byte of a call, so a call must not ask for bytes that are not
    sent."""
    records = records_of(b"h" * 4, b"x" * 40)
    raw = Raw(b"".join(records))
    ours = linked(raw, sending=OTHER, receiving=ONE)
    left = sum(map(len, records))
    for place in (bytearray(4), bytearray(10), bytearray(30)):
        receive_all(ours, [memoryview(place)], socket.MSG_WAITALL)
    for asked in raw.asked:
        assert asked <= left
        left -= asked


def test_a_key_is_used_for_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_seal, "_MAX_RECORDS", 4)
    raw = Raw()
    link = linked(raw)
    link.sendall(b"a")
    assert not is_spent(link)
    link.sendall(b"a")
    assert is_spent(link), "closed after the exchange, long before the bound"
    link.sendall(b"ab")
    link.sendall(b"a")
    with pytest.raises(SealError, match="encrypted 4 records, the maximum"):
        link.sendall(b"a")
    before = bytes(raw.sent)
    assert len({before[i : i + OVERHEAD + 1] for i in range(0, 2 * (OVERHEAD + 1), OVERHEAD + 1)}) == 2
    assert not is_spent(cast(SealedLink, raw))


def test_equal_content_is_encrypted_differently() -> None:
    records = records_of(b"a" * SMALL, b"a" * SMALL)
    assert records[0][48:] != records[1][48:]


def test_a_message_in_parts_is_not_sent_without_waiting() -> None:
    raw = Raw()
    with pytest.raises(BlockingIOError):
        linked(raw).send(b"request", socket.MSG_DONTWAIT)
    assert not raw.sent


def test_a_missing_or_old_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp_seal.check_package()
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(UsageError, match=r"version 47 or later.*pip install 'kvferry\[encryption\]'") as caught:
        tcp_seal.check_package()
    assert caught.value.field == "kv_encryption"
