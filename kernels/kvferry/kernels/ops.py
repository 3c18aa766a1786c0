"""One table of operations, and which family of kernels fills it on which device.

Shapes: T rows, H query heads, K key-value heads (H a multiple of K), D values per head, B tokens per page.
Pages are `[pages, layers, 2, K, B, D]`, keys before values: one page of all layers is one range of memory.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.batch import AttentionBatch

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] to [T, out], with its weights inside."""

AttentionPlan = object
"""What a family works out once per step and uses in every layer; made and read by the same family."""


@dataclass(frozen=True, slots=True)
class Ops:
    """A family of kernels."""

    name: str

    pack_linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    """(weight [out, in], bias [out] or none) to a projection; may keep its own copy in another layout."""

    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(token ids [T] int64, table [vocabulary, hidden]) to [T, hidden]."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x [..., n], weight [n], epsilon) to x / rms(x) * weight (Zhang and Sennrich, RMSNorm, 2019)."""

    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x, residual, weight, epsilon): adds x to the residual IN PLACE, returns the sum's `rms_norm`."""

    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(x [T, heads, D], cos [T, D], sin [T, D], both float32): rotary embedding IN PLACE, pairs (i, i + D/2)
    (Su et al., RoFormer, 2021). x * cos + halves of x swapped * sin; `sin` comes with its first half negated."""

    write_kv: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    """(kv [T, 2, K, D], pages, layer, slots [T]): each row's key and value into its slot."""

    plan_attention: Callable[[AttentionBatch, torch.Tensor], AttentionPlan]
    """(batch, pages) to what `paged_attention` needs for this step, in every layer."""

    paged_attention: Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, float], torch.Tensor]
    """(q [T, H, D], pages, layer, plan, scale) to [T, H * D]: causal attention of each row over its sequence's
    pages, this step's own keys and values included, so they must have been written. Slots beyond a sequence's
    context are never used, whatever they hold, NaN included. Query head h reads KV head h // (H / K)."""

    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    """[T, 2 n] to silu of the first half times the second (Shazeer, SwiGLU, 2020)."""

    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, n], rows [R] int64) to [R, n]."""


FAMILIES = {"reference": "kvferry.kernels.reference", "torch": "kvferry.kernels.torch_cpu"}
"""Family name to the module whose `OPS` it is; imported when asked for."""


def ops_for(device: torch.device | str, family: str | None = None) -> Ops:
    """The operations to use on a device.

    Args:
        device: where the tensors are.
        family: a name of `FAMILIES`; `None`: the fastest that runs there.

    Raises:
        UsageError: there is no such family.
    """
    chosen = family or "torch"
    if chosen not in FAMILIES:
        raise UsageError(f"no kernel family {chosen!r}; known: {', '.join(FAMILIES)}", field="kernels")
    ops = importlib.import_module(FAMILIES[chosen]).OPS
    assert isinstance(ops, Ops)
    return ops
