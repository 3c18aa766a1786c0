"""Which launch choices a tuner tries, and which of them won.

One value is varied at a time, from the best so far on: a whole grid would be hundreds of compilations. A candidate wins
by the geometric mean over all shapes that are launched by the same row, and by a clear margin: noise moves nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Values = tuple[tuple[str, int], ...]
"""Block sizes by their names, with `warps` and `stages`."""

LEAST_GAIN = 1.02
"""How many times as fast a candidate is at least to win."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """How one operation of the launch table is tuned."""

    ops: tuple[str, ...]
    """Measured operations that it decides about."""
    grid: Mapping[str, Sequence[int]]
    """To names of its values what is tried."""


_BLOCKS: Mapping[str, Sequence[int]] = {"block": (512, 1024, 2048, 4096, 8192), "warps": (4, 8, 16)}
_SWEEPS: Mapping[str, Sequence[int]] = {"block": (1024, 2048, 4096, 8192), "warps": (8, 16, 32)}
TUNABLE: Mapping[str, Tunable] = MappingProxyType(
    {
        "attend_small": Tunable(
            ("decode_attention",),
            {
                "keys": (16, 32, 64, 128),
                "partition": (256, 512, 1024, 2048),
                "warps": (2, 4, 8),
                "stages": (2, 3, 4, 5, 6),
            },
        ),
        "merge_parts": Tunable(("decode_attention",), {"block": (4, 8, 16, 32), "warps": (1, 2, 4, 8)}),
        "attend_large": Tunable(
            ("prefill_attention",),
            {"rows": (64, 128), "keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4, 5)},
        ),
        "rms_norm": Tunable(("add_rms_norm",), {"warps": (2, 4, 8, 16)}),
        "silu_mul": Tunable(("silu_mul",), _BLOCKS),
        "place_qkv": Tunable(("place_qkv",), {"tile": (2, 4, 8, 16, 32), "warps": (1, 2, 4, 8)}),
        "take_rows": Tunable(("embedding", "gather_rows"), _BLOCKS),
        "sample": Tunable(("sample",), _SWEEPS),
        "log_probabilities": Tunable(("log_probabilities",), _SWEEPS),
        "move_blocks": Tunable(("copy_blocks", "gather_blocks", "scatter_blocks"), _BLOCKS),
        "digest_blocks": Tunable(
            ("digest_blocks",), {"block": (512, 1024, 2048, 4096), "turns": (2, 4, 8, 16), "warps": (4, 8, 16)}
        ),
    }
)
"""To each operation of the launch table; the others stay as they are."""


def steps(current: Values, grid: Mapping[str, Sequence[int]]) -> list[Values]:
    """Everything that differs from the current values in one of them, the nearest first.

    Args:
        current: where to start; what is not in the grid is kept.
        grid: to each name what may be tried.
    """
    own = dict(current)
    varied = [
        (abs(math.log2(value / own[name])), name, value)
        for name, values in grid.items()
        for value in values
        if name in own and value != own[name]
    ]
    return [tuple((own | {name: value}).items()) for _, name, value in sorted(varied)]


def gain(incumbent: Sequence[float], candidate: Sequence[float]) -> float:
    """How many times as fast a candidate is, over the same shapes in the same order; at least one.

    Args:
        incumbent: seconds of each.
        candidate: seconds of each.
    """
    ratios = [math.log(before / now) for before, now in zip(incumbent, candidate, strict=True)]
    return math.exp(sum(ratios) / len(ratios))


def winner(incumbent: Values, seconds: Mapping[Values, Sequence[float]]) -> Values:
    """The fastest of those that were tried, unless the incumbent is as good but for noise.

    Args:
        incumbent: one of them.
        seconds: to each those of all shapes.
    """
    gains = {values: gain(seconds[incumbent], found) for values, found in seconds.items()}
    best = max(gains, key=lambda values: gains[values])
    return best if gains[best] >= LEAST_GAIN else incumbent
