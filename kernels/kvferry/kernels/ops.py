"""The tables of operations, and which family of kernels fills them on which device.

`Ops` is what a model is made of, and every family has all of it. `DeviceOps` is what a runner needs beside it to stay
on its device between steps; the torch family has none, because on a CPU numpy does the same (`engine/sampler.py`).

    family      Ops   DeviceOps   runs on
    reference   yes   yes         anything; the definition of both, written to be read
    torch       yes   no          anything
    triton      yes   yes         GPUs, and any CPU in Triton's interpreter, for tests

Shapes: T rows, H query heads, K key-value heads (H a multiple of K), D values per head, B tokens per page, R rows of
logits, V the vocabulary. Pages are `[pages, layers, 2, K, B, D]`, keys before values: one page of all layers is one
range of memory.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.batch import AttentionBatch, AttentionRules, HeadNorms, SharedPrefix, SingleRows
from kvferry.kernels.block_moves import Overlay
from kvferry.kernels.families import FAMILIES, family_for
from kvferry.kernels.rows_of_logits import Adjustments, Draws

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] to [T, out], with its weights inside."""

AttentionPlan = object
"""What a family works out once per step and uses in every layer; made and read by the same family."""


def _runs_anywhere(device: torch.device) -> str | None:
    return None


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

    place_qkv: Callable[
        [torch.Tensor, HeadNorms | None, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None
    ]
    """(qkv [T, H + 2 K, D], norms or none, cos, sin, pages, layer, slots): `rms_norm` of each query and key head where
    there are norms, `rotate` of both, `write_kv`. Queries are left in `qkv`; what stays of its keys and values is
    anybody's guess."""

    plan_attention: Callable[[AttentionBatch, torch.Tensor, int], AttentionPlan]
    """(batch, pages, H) to what `paged_attention` needs for this step, in every layer."""

    paged_attention: Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, float], torch.Tensor]
    """(q [T, H, D], pages, layer, plan, scale) to [T, H * D]: causal attention of each row over its sequence's
    pages, this step's own keys and values included, so they must have been written. Slots beyond a sequence's
    context are never used, whatever they hold, NaN included. Query head h reads KV head h // (H / K)."""

    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    """[T, 2 n] to silu of the first half times the second (Shazeer, SwiGLU, 2020)."""

    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, n], rows [R] int64) to [R, n]."""

    why_not: Callable[[torch.device], str | None] = _runs_anywhere
    """What keeps the family from running on a device, with what to do about it; `None`: nothing."""


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """What a runner needs that brings nothing to the host between steps."""

    attend: Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, AttentionRules], torch.Tensor]
    """`Ops.paged_attention` by other rules: sliding window, capped scores, sinks."""

    plan_cascade: Callable[[AttentionBatch, torch.Tensor, int, Sequence[SharedPrefix]], AttentionPlan]
    """`Ops.plan_attention` for sequences of which some begin with the same pages: these are read once for all of
    them. The results are the same."""

    plan_rows: Callable[[SingleRows, torch.Tensor, int], AttentionPlan]
    """(rows, pages, H) to a plan that reads tables and lengths on the device, each time something attends by it; no
    more of it is on the host than shapes. The results are those of `Ops.plan_attention`."""

    adjust_logits: Callable[[torch.Tensor, Adjustments], torch.Tensor]
    """(logits [R, V] float32, wishes) to [R, V] float64: bias, penalties, bans, in the order of the sampler."""

    sample: Callable[[torch.Tensor, Draws], torch.Tensor]
    """(logits [R, V] float32 or float64, draws) to token ids [R] int64; what `engine.sampler.draw` draws."""

    log_probabilities: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(logits [R, V] float32, token ids [R]) to their natural log-probabilities [R] float64."""

    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(pages, sources [N] int64, targets [N]): whole pages inside the pool; no target is a source or twice there."""

    gather_blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(pages, blocks [N] int64) to [N, layers, 2, K, B, D], contiguous."""

    scatter_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(staged [N, layers, 2, K, B, D], pages, blocks [N]): the inverse."""

    relayout_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Overlay], torch.Tensor]
    """(staged [n, layers, 2, k, b, D], pages, blocks [N] int64, overlay): what staged pages of another block size,
    element type or share of the heads hold of the target blocks' tokens, into these; nothing else is written.
    Returns [1] int32: of finite values how many the target's type could not hold."""

    digest_blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(pages, blocks [N] int64) to [N, 2] int64: 128 bits of each page's content. It tells damage, not forgery."""


def ops_for(device: torch.device | str, family: str | None = None) -> Ops:
    """The operations to use on a device.

    Args:
        device: where the tensors are.
        family: a name of `FAMILIES`; `None`: the fastest that runs there.

    Raises:
        UsageError: there is no such family, or it does not run there.
    """
    ops = _load(device, family).OPS
    assert isinstance(ops, Ops)
    if reason := ops.why_not(torch.device(device)):
        raise UsageError(reason, field="kernels")
    return ops


def device_ops_for(device: torch.device | str, family: str | None = None) -> DeviceOps:
    """The operations of a runner that stays on its device.

    Raises:
        UsageError: the family has none, or does not run there.
    """
    name = ops_for(device, family).name
    found = getattr(_load(device, name), "DEVICE_OPS", None)
    if found is None:
        raise UsageError(f"the kernels {name!r} have no operations of a runner on its device", field="kernels")
    assert isinstance(found, DeviceOps)
    return found


def _load(device: torch.device | str, family: str | None) -> ModuleType:
    chosen = family or family_for(device)
    if chosen not in FAMILIES:
        raise UsageError(f"no kernel family {chosen!r}; known: {', '.join(FAMILIES)}", field="kernels")
    try:
        return importlib.import_module(FAMILIES[chosen])
    except ModuleNotFoundError as error:
        if error.name != chosen:
            raise
        raise UsageError(
            f"the kernels {chosen!r} need the package {chosen}, which is not installed here; install it, or take"
            " --kernels torch",
            field="kernels",
        ) from error
