"""What a tier did since the worker started: counts for status, metrics and `kvferry doctor`."""

from dataclasses import dataclass


@dataclass(slots=True)
class TierStats:
    """Totals of one tier."""

    name: str
    hits: int = 0
    """Objects asked for that were there."""
    misses: int = 0
    loads: int = 0
    """Objects read."""
    bytes_loaded: int = 0
    seconds: float = 0.0
    """Spent reading."""
    failures: int = 0
    """Reads and writes that failed."""
    stores: int = 0
    """Objects written."""
    bytes_stored: int = 0
    dropped: int = 0
    """Stores not made because too many waited."""

    def add(self, **more: float) -> None:
        """Count; the names are the fields'."""
        for name, value in more.items():
            setattr(self, name, getattr(self, name) + value)
