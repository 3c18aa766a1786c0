"""Packs adapters for the compiled CPU kernels: A as rows, B in panels of 16 outputs like the matrix that it updates.

    a   [ranks of all parts][inputs, padded to 32]
    b   [panels of part 0][rank 0][16] | [panels of part 1][rank 1][16] | ...

A part is one of the projections fused into a packed matrix; its rank is padded with zeros to a multiple of 4. Values
are float32, or bfloat16 if the inputs of matrix products are rounded to bfloat16 too. In that case two adjacent vectors
of 16 values are interleaved value by value, so that a vector of pairs can be split by a shift and a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.weights.adapters.adapter_folder import Adapter

if TYPE_CHECKING:
    from kvferry.kernels import _cpu

_PANEL, _RANK_STEP = 16, 4
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The projections of each packed matrix, in order."""
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Update = tuple[list[int], Bytes, Bytes]


@dataclass(frozen=True, slots=True, eq=False)
class CompiledAdapter:
    """An adapter in the memory of the compiled kernels."""

    native: "_cpu.Adapter"
    num_bytes: int


def pack_adapter(adapter: Adapter, runner: "_cpu.Runner", num_layers: int, *, is_bf16: bool) -> CompiledAdapter:
    """Pack an adapter for a native model.

    Args:
        adapter: the adapter, with float32 matrices.
        runner: runner of the native model.
        num_layers: number of layers of the model.
        is_bf16: whether the packed matrices are bfloat16; otherwise float32.
    """
    layers = [dict(_updates(adapter, layer, is_bf16)) for layer in range(num_layers)]
    num_bytes = sum(a.nbytes + b.nbytes for layer in layers for _, a, b in layer.values())
    return CompiledAdapter(runner.adapter(layers, is_bf16), num_bytes)


def _updates(adapter: Adapter, layer: int, is_bf16: bool) -> Iterator[tuple[str, Update]]:
    for matrix, parts in _FUSED.items():
        found = [adapter.updates.get((layer, part)) for part in parts]
        given = [update for update in found if update is not None]
        if given:
            a = [_padded(_padded(update.a, 0, _RANK_STEP), 1, 2 * _PANEL) for update in given]
            b = [_panels(_padded(update.b, 1, _RANK_STEP)) for update in given]
            ranks = [0 if update is None else -(-len(update.a) // _RANK_STEP) * _RANK_STEP for update in found]
            yield matrix, (ranks, _stored(a, is_bf16), _stored(b, is_bf16))


def _panels(b: Floats) -> Floats:
    """Convert [out, rank] to [panels, rank, 16]."""
    rows = _padded(b, 0, _PANEL)
    return rows.reshape(-1, _PANEL, rows.shape[1]).transpose(0, 2, 1)


def _padded(values: Floats, axis: int, multiple: int) -> Floats:
    """Pad an axis with zeros to a multiple."""
    lacking = -values.shape[axis] % multiple
    return np.pad(values, [(0, lacking), (0, 0)] if axis == 0 else [(0, 0), (0, lacking)])


def _stored(arrays: list[Floats], is_bf16: bool) -> Bytes:
    """Return the bytes of arrays as float32, or rounded to the nearest bfloat16 and in pairs."""
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    if not is_bf16:
        return flat.view(np.uint8)
    bits = flat.view(np.uint32)
    halves = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.ascontiguousarray(halves.reshape(-1, 2, _PANEL).transpose(0, 2, 1)).reshape(-1).view(np.uint8)
