"""Frames: round trips, and refusal of every damaged frame."""

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.interface.frame import HEADER_BYTES, FrameDamaged, Frames, chunked, flat
from kvferry.kv.tiers.interface.tier import ObjectKey, TierError

SECRET = b"a secret of 16 bytes"
NAME = BlockHash(bytes(range(32)))
KEY = ObjectKey(NAME, "tenant-a")


def reopen(frames: Frames, key: ObjectKey, header: bytes, stored: bytes, sizes: Sequence[int] = ()) -> bytes:
    """Decode stored bytes that arrive in parts of the given sizes; return the content."""
    opening = frames.open(header, key)
    into = bytearray(stored)
    at = 0
    for size in (*sizes, len(into)):
        opening.feed(memoryview(into)[at : at + size])
        at = min(len(into), at + size)
    opening.finish()
    return bytes(into)


def framed(frames: Frames, content: bytes, key: ObjectKey = KEY) -> tuple[bytes, bytes]:
    header, stored = frames.frame(key, [memoryview(content)])
    return header, b"".join(stored)


@pytest.mark.parametrize("encrypt", [False, True])
@given(content=st.binary(min_size=1, max_size=2000), cuts=st.lists(st.integers(0, 700), max_size=6))
def test_content_is_preserved_for_any_split(encrypt: bool, content: bytes, cuts: list[int]) -> None:
    frames = Frames(SECRET, len(content), encrypt=encrypt)
    parts, at = [], 0
    for cut in (*cuts, len(content)):
        parts.append(memoryview(content)[at : at + cut])
        at = min(len(content), at + cut)
    header, stored = frames.frame(KEY, parts)
    assert len(header) == HEADER_BYTES
    assert frames.frame_bytes == HEADER_BYTES + len(content)
    assert reopen(frames, KEY, header, b"".join(stored), cuts[::-1]) == content
    if encrypt and len(content) > 8:
        assert b"".join(stored) != content
    if not encrypt:
        assert all(a.obj is b.obj for a, b in zip(stored, [p for p in parts if len(p)], strict=True)), (
            "plain frames do not copy the content"
        )


@pytest.mark.parametrize("encrypt", [False, True])
@given(data=st.data())
def test_any_flipped_bit_is_found(encrypt: bool, data: st.DataObject) -> None:
    content = bytes(range(250)) * 3
    frames = Frames(SECRET, len(content), encrypt=encrypt)
    whole = bytearray(b"".join(framed(frames, content)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FrameDamaged):
        reopen(frames, KEY, bytes(whole[:HEADER_BYTES]), bytes(whole[HEADER_BYTES:]))


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_frame_is_bound_to_secret_tenant_name_and_length(encrypt: bool) -> None:
    content = b"x" * 100
    frames = Frames(SECRET, 100, encrypt=encrypt)
    header, stored = framed(frames, content)
    others = [
        (Frames(b"another secret of 16", 100, encrypt=encrypt), KEY),
        (frames, ObjectKey(NAME, "tenant-b")),
        (frames, ObjectKey(BlockHash(bytes(32)), "tenant-a")),
        (Frames(SECRET, 101, encrypt=encrypt), KEY),
    ]
    for other, key in others:
        with pytest.raises(FrameDamaged):
            other.open(header, key)
    assert reopen(frames, KEY, header, stored) == content


def test_pages_of_one_header_under_another_are_found() -> None:
    frames = Frames(SECRET, 100)
    header, _ = framed(frames, b"x" * 100)
    with pytest.raises(FrameDamaged, match="digest"):
        reopen(frames, KEY, header, b"y" * 100)


def test_the_same_pages_have_another_digest_under_another_name() -> None:
    """Digests are seeded, so a writer without the secret cannot choose contents of equal digests."""
    frames = Frames(SECRET, 100)
    one, _ = framed(frames, b"x" * 100)
    other, _ = framed(frames, b"x" * 100, ObjectKey(BlockHash(bytes(32)), "tenant-a"))
    assert one[56:72] != other[56:72]


def test_with_encryption_plain_frames_are_refused() -> None:
    header, _ = framed(Frames(SECRET, 10), b"0123456789")
    with pytest.raises(FrameDamaged, match="not encrypted"):
        Frames(SECRET, 10, encrypt=True).open(header, KEY)


def test_without_encryption_sealed_frames_are_read() -> None:
    header, stored = framed(Frames(SECRET, 10, encrypt=True), b"0123456789")
    assert reopen(Frames(SECRET, 10), KEY, header, stored) == b"0123456789"


def test_sealing_twice_gives_different_bytes() -> None:
    frames = Frames(SECRET, 64, encrypt=True)
    assert framed(frames, bytes(64))[1] != framed(frames, bytes(64))[1]


def test_an_unknown_flag_is_another_version() -> None:
    frames = Frames(SECRET, 10)
    header, _ = framed(frames, b"0123456789")
    from kvferry.kv.tiers.interface import frame

    mac_key, _, _ = frames._keys(KEY.tenant)
    forged = frame._header(mac_key, 2, 10, NAME, header[56:72], b"")
    with pytest.raises(FrameDamaged, match="version"):
        frames.open(forged, KEY)


def test_no_header_at_all() -> None:
    for header in (b"", b"x" * HEADER_BYTES, bytes(HEADER_BYTES), bytes(HEADER_BYTES - 1)):
        with pytest.raises(FrameDamaged, match="not a frame"):
            Frames(SECRET, 10).open(header, KEY)


def test_without_the_package_encryption_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = framed(Frames(SECRET, 10, encrypt=True), b"0123456789")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(UsageError, match=r"pip install 'kvferry\[encryption\]'"):
        Frames(SECRET, 10, encrypt=True)
    with pytest.raises(TierError, match=r"pip install 'kvferry\[encryption\]'"):
        Frames(SECRET, 10).open(header, KEY)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Frames(b"short", 10)
    with pytest.raises(ValueError, match="positive"):
        Frames(SECRET, 0)
    with pytest.raises(ValueError, match="9 bytes in total"):
        Frames(SECRET, 10).frame(KEY, [memoryview(b"123456789")])


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 40))
def test_runs_hold_every_byte_once_in_order(sizes: list[int], size: int) -> None:
    parts = [memoryview(bytes([i]) * n) for i, n in enumerate(sizes)]
    runs = list(chunked(flat(parts, sum(sizes)), size))
    assert b"".join(bytes(p) for run in runs for p in run) == b"".join(parts)
    assert all(0 < sum(len(p) for p in run) <= size for run in runs)
    assert all(sum(len(p) for p in run) == size for run in runs[:-1])


def test_other_formats_are_taken_as_bytes() -> None:
    assert flat([memoryview(bytes(8)).cast("Q")], 8)[0].format == "B"
