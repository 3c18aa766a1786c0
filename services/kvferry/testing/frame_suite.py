"""Conformance suite for tiers that store frames, in addition to `tier_suite`: detection and removal of damaged values.

The rig must have `raw`, `reopen` and `stranger`.
"""

from collections.abc import Callable

from kvferry.kv.tiers.interface.tier import ObjectKey
from kvferry.testing.tier_suite import OBJECT_BYTES, SECONDS, TierRig, content, get, key, present, put, refused


def _refused_and_healed(rig: TierRig, number: int, stored: bytes) -> None:
    """Check that the stored bytes are rejected and do not prevent the next store."""
    raw = rig.raw
    assert raw is not None
    raw.write(key(number), stored)
    refused(lambda: get(rig.tier, number))
    assert put(rig.tier, number), "the damaged value was removed, so the object can be stored"
    assert get(rig.tier, number) == content(number)


def check_flipped_bits_are_found(rig: TierRig) -> None:
    """Check that a flipped bit is detected in every field of the header, in the pages and at the end."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    good = raw.read(key(1))
    header = [raw.frame_at + at for at in (0, 7, 8, 12, 16, 23, 24, 55, 56, 71, 72, 83, 84, 111, 112, 127)]
    pages = [raw.pages_at + at for at in (0, 1, 4095, OBJECT_BYTES // 2, OBJECT_BYTES - 1)]
    for at in {*header, *pages, raw.frame_at + 128, len(good) - 1}:
        _refused_and_healed(rig, 1, good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])


def check_cut_and_lengthened_values_are_found(rig: TierRig) -> None:
    """Check that values of a wrong length, and random bytes, are detected."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    good = raw.read(key(1))
    for stored in (good[:-1], good[: len(good) // 2], good[:127], good[:1], good + b"\0", bytes(len(good)), b"x" * 8):
        _refused_and_healed(rig, 1, stored)


def check_another_objects_value_is_found(rig: TierRig) -> None:
    """Check that a value that was stored under a different name is rejected."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    put(rig.tier, 2)
    _refused_and_healed(rig, 1, raw.read(key(2)))


def check_another_version_is_found(rig: TierRig) -> None:
    """Check that a value of a different format version is rejected."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    good = raw.read(key(1))
    at = raw.frame_at + 7
    _refused_and_healed(rig, 1, good[:at] + bytes([good[at] + 1]) + good[at + 1 :])


def check_values_of_strangers_are_found(rig: TierRig) -> None:
    """Check that values written with a different secret, or for a different tenant, are rejected."""
    raw = rig.raw
    assert raw is not None
    assert rig.stranger is not None
    rig.opened.append(rig.stranger())
    put(rig.opened[-1], 1)
    refused(lambda: get(rig.tier, 1))
    assert put(rig.tier, 1)
    assert get(rig.tier, 1) == content(1)
    into = bytearray(OBJECT_BYTES)
    other = ObjectKey(key(1).name, "tenant-b")
    refused(lambda: rig.tier.load(other, [memoryview(into)], SECONDS))
    assert not any(into), "not even its pages were read"


def check_it_outlives_its_process(rig: TierRig) -> None:
    """Check that a second instance of the same store finds the stored objects, and that both continue to work."""
    put(rig.tier, 1)
    other = rig.again()
    assert present(other, [1, 2]) == [1]
    assert get(other, 1) == content(1)
    put(other, 2)
    assert get(rig.tier, 2) == content(2), "an object stored by the second instance is found"
    rig.tier.close()
    assert get(other, 1) == content(1)


FRAMED_CHECKS: tuple[Callable[[TierRig], None], ...] = (
    check_flipped_bits_are_found,
    check_cut_and_lengthened_values_are_found,
    check_another_objects_value_is_found,
    check_another_version_is_found,
    check_values_of_strangers_are_found,
    check_it_outlives_its_process,
)
