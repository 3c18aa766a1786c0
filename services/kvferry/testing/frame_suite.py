"""What tiers that store frames must do, besides `tier_suite`: find whatever was done to a stored value, and heal.

The rig has `raw`, `reopen` and `stranger`.
"""

from collections.abc import Callable

from kvferry.kv.tiers.tier import ObjectKey
from kvferry.testing.tier_suite import OBJECT_BYTES, SECONDS, Rig, content, get, key, present, put, refused


def _refused_and_healed(rig: Rig, number: int, stored: bytes) -> None:
    """What lies there is not accepted, whatever it is; it stands in nobody's way."""
    raw = rig.raw
    assert raw is not None
    raw.write(key(number), stored)
    refused(lambda: get(rig.tier, number))
    assert put(rig.tier, number), "the damaged one was removed, so it can be stored again"
    assert get(rig.tier, number) == content(number)


def check_flipped_bits_are_found(rig: Rig) -> None:
    """Anywhere: in every field of the header, in the pages, at the end."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    good = raw.read(key(1))
    header = [raw.frame_at + at for at in (0, 7, 8, 12, 16, 23, 24, 55, 56, 71, 72, 83, 84, 111, 112, 127)]
    pages = [raw.pages_at + at for at in (0, 1, 4095, OBJECT_BYTES // 2, OBJECT_BYTES - 1)]
    for at in {*header, *pages, raw.frame_at + 128, len(good) - 1}:
        _refused_and_healed(rig, 1, good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])


def check_cut_and_lengthened_values_are_found(rig: Rig) -> None:
    """Of any other length, or of no sense at all."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    good = raw.read(key(1))
    for stored in (good[:-1], good[: len(good) // 2], good[:127], good[:1], good + b"\0", bytes(len(good)), b"x" * 8):
        _refused_and_healed(rig, 1, stored)


def check_another_objects_value_is_found(rig: Rig) -> None:
    """A value is bound to its name."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    put(rig.tier, 2)
    _refused_and_healed(rig, 1, raw.read(key(2)))


def check_another_version_is_found(rig: Rig) -> None:
    """It is not guessed at."""
    raw = rig.raw
    assert raw is not None
    put(rig.tier, 1)
    good = raw.read(key(1))
    at = raw.frame_at + 7
    _refused_and_healed(rig, 1, good[:at] + bytes([good[at] + 1]) + good[at + 1 :])


def check_values_of_strangers_are_found(rig: Rig) -> None:
    """Without the secret nobody makes a value that is accepted, nor with it one for another tenant."""
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


def check_it_outlives_its_process(rig: Rig) -> None:
    """Who opens the same place finds what was stored, and both go on."""
    put(rig.tier, 1)
    other = rig.again()
    assert present(other, [1, 2]) == [1]
    assert get(other, 1) == content(1)
    put(other, 2)
    assert get(rig.tier, 2) == content(2), "what another worker stored is found"
    rig.tier.close()
    assert get(other, 1) == content(1)


FRAMED_CHECKS: tuple[Callable[[Rig], None], ...] = (
    check_flipped_bits_are_found,
    check_cut_and_lengthened_values_are_found,
    check_another_objects_value_is_found,
    check_another_version_is_found,
    check_values_of_strangers_are_found,
    check_it_outlives_its_process,
)
