"""What the machine allows in this very round: reading memory, and products; and how much of it an engine reaches."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.core.clock import Clock
from kvferry.kernels import compiled

_READ_BYTES = 512 << 20
_CHUNKS = 64
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rates of all threads together."""

    bytes_per_second: float
    flop_per_second: float


def measurer(threads: int, clock: Clock) -> Callable[[], Bounds] | None:
    """Something that measures now; `None` where the compiled kernels were not built."""
    module = compiled.extension()
    if module is None:
        return None
    pool, level = compiled.make_pool(threads), compiled.levels()[-1]
    data = np.ones(_READ_BYTES, np.uint8)

    def measure() -> Bounds:
        reads, products = [], []
        for _ in range(_TURNS):
            begun = clock.monotonic()
            module.read_all(pool, level, data)
            reads.append(_READ_BYTES / (clock.monotonic() - begun))
            begun = clock.monotonic()
            done = module.sum_products(pool, level, _CHUNKS)
            products.append(done / (clock.monotonic() - begun))
        return Bounds(statistics.median(reads), statistics.median(products))

    return measure


def decode_share(tokens_per_second: float, weight_bytes: int, bounds: Bounds) -> float:
    """Of the read rate: every weight is read once a token."""
    return tokens_per_second * weight_bytes / bounds.bytes_per_second


def prefill_share(tokens_per_second: float, tokens: int, flop: float, bounds: Bounds) -> float:
    """Of the rate of products, for a prompt that takes so many operations."""
    return tokens_per_second / tokens * flop / bounds.flop_per_second
