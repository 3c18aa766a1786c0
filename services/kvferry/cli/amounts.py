"""Numbers with nouns and units, as text."""

_MIB = 1 << 20


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: `1 block`, `2 blocks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_of(num_bytes: float) -> str:
    """Return a size in MiB."""
    return f"{num_bytes / _MIB:.1f} MiB"


def duration_of(milliseconds: float) -> str:
    """Return a duration in the unit in which it has up to four digits before the point: us, ms or s."""
    if milliseconds < 1.0:
        return f"{1e3 * milliseconds:.1f} us"
    return f"{milliseconds:.2f} ms" if milliseconds < 10_000 else f"{milliseconds / 1e3:.1f} s"
