"""Tier statistics since the start of the worker: counts for status, metrics and `kvferry doctor`."""

from dataclasses import dataclass


@dataclass(slots=True)
class TierStats:
    """Statistics of one tier since the start of the worker."""

    name: str
    hits: int = 0
    """Number of objects found by lookups."""
    misses: int = 0
    loads: int = 0
    """Number of objects read."""
    bytes_loaded: int = 0
    seconds: float = 0.0
    """Total time spent reading, in seconds."""
    failures: int = 0
    """Number of reads and writes that failed."""
    stores: int = 0
    """Number of objects written."""
    bytes_stored: int = 0
    dropped: int = 0
    """Number of stores that were dropped because the queue was full."""

    def add(self, **more: float) -> None:
        """Add to counters, which are given by field name."""
        for name, value in more.items():
            setattr(self, name, getattr(self, name) + value)
