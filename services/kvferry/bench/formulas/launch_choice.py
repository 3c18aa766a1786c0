"""Search strategy of the kernel tuner: generates candidate launch choices and selects the winner.

One value is varied at a time, starting from the best choice so far: a full grid would need hundreds of compilations. A
candidate wins by the geometric mean of its speedups over all shapes of one table row, with a margin above the noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Values = tuple[tuple[str, int], ...]
"""A launch choice: (name, value) of each block size, `warps` and `stages`."""

MIN_GAIN = 1.02
"""Minimum speedup of a winning candidate."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """Tuning parameters of an operation of the launch table."""

    ops: tuple[str, ...]
    """Benchmark operations that use this operation of the launch table."""
    grid: Mapping[str, Sequence[int]]
    """Candidate values by name."""


_BLOCKS: Mapping[str, Sequence[int]] = {"block": (512, 1024, 2048, 4096, 8192), "warps": (4, 8, 16)}
_CHUNKS: Mapping[str, Sequence[int]] = {"chunk": (1024, 2048, 4096, 8192, 16384), "warps": (4, 8, 16)}
TUNABLE: Mapping[str, Tunable] = MappingProxyType(
    {
        "attend_small": Tunable(
            ("decode_attention", "decode_int8", "decode_fp8"),
            {
                "keys": (16, 32, 64, 128),
                "partition": (256, 512, 1024, 2048),
                "warps": (2, 4, 8),
                "stages": (2, 3, 4, 5, 6),
            },
        ),
        "latent_small": Tunable(
            ("latent_decode",),
            {
                "rows": (16, 32, 64),
                "keys": (16, 32, 64, 128),
                "partition": (512, 1024, 2048, 4096, 8192),
                "warps": (4, 8),
                "stages": (2, 3, 4, 5, 6),
            },
        ),
        "merge_parts": Tunable(("decode_attention", "latent_decode"), {"block": (4, 8, 16, 32), "warps": (1, 2, 4, 8)}),
        "attend_large": Tunable(
            ("prefill_attention",),
            {"rows": (64, 128), "keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4, 5)},
        ),
        "rms_norm": Tunable(("add_rms_norm",), {"warps": (2, 4, 8, 16)}),
        "silu_mul": Tunable(("silu_mul",), _BLOCKS),
        "place_qkv": Tunable(("place_qkv",), {"tile": (2, 4, 8, 16, 32), "warps": (1, 2, 4, 8)}),
        "take_rows": Tunable(("embedding", "gather_rows"), _BLOCKS),
        "sample": Tunable(("sample",), {"block": (256, 512, 1024), "sweep": (4096, 8192, 16384), "warps": (8, 16, 32)}),
        "sample_chunks": Tunable(("sample",), _CHUNKS),
        "log_probabilities": Tunable(("log_probabilities",), _CHUNKS),
        "move_blocks": Tunable(("gather_blocks", "scatter_blocks"), _BLOCKS),
        "digest_blocks": Tunable(
            ("digest_blocks",), {"block": (512, 1024, 2048, 4096), "turns": (2, 4, 8, 16), "warps": (4, 8, 16)}
        ),
    }
)
"""Tuning parameters by operation of the launch table; other operations are not tuned."""


def steps(current: Values, grid: Mapping[str, Sequence[int]]) -> list[Values]:
    """Return all candidates that differ from the current choice in one value, ordered by distance.

    Args:
        current: the current choice; values that are not in the grid are kept.
        grid: candidate values by name.
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
    """Return the geometric mean of a candidate's speedups. Both sequences list the same shapes in the same order, at
    least one.

    Args:
        incumbent: seconds for each shape.
        candidate: seconds for each shape.
    """
    ratios = [math.log(before / now) for before, now in zip(incumbent, candidate, strict=True)]
    return math.exp(sum(ratios) / len(ratios))


def winner(incumbent: Values, seconds: Mapping[Values, Sequence[float]]) -> Values:
    """Return the fastest candidate, or the incumbent if no candidate is `MIN_GAIN` times as fast.

    Args:
        incumbent: the current choice, a key of `seconds`.
        seconds: seconds for each shape, by candidate.
    """
    gains = {values: gain(seconds[incumbent], found) for values, found in seconds.items()}
    best = max(gains, key=lambda values: gains[values])
    return best if gains[best] >= MIN_GAIN else incumbent
