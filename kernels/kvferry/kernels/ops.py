"""Operation tables `Ops` and `DeviceOps`, their contracts, and the selection of a kernel backend per device.

`Ops` contains the operations of models; every backend implements all of them. `DeviceOps` contains additional
operations for a runner without host synchronization; the torch backend does not implement them, since on a CPU the
host's sampler is used (`engine/execute/run/sampler.py`).

    backend     Ops   DeviceOps   runs on
    reference   yes   yes         any device; defines the results, written for clarity
    torch       yes   no          any device
    triton      yes   yes         GPUs, and any CPU in Triton's interpreter, for tests

Shapes: T rows, H query heads, K key-value heads (H a multiple of K), D values per head, B tokens per page, R rows of
logits, V the vocabulary. Pages are `[pages, layers, 2, K, B, D]`, keys before values, so that a page with all its
layers is one range of memory; with latent attention, pages are `[pages, layers, 1, 1, B, D]`. Contracts are written as
(arguments) -> result.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.backends import BACKENDS, backend_for
from kvferry.kernels.batch import (
    AttentionBatch,
    AttentionRules,
    ExpertWeights,
    HeadNorms,
    LatentUp,
    LowRankGroup,
    SingleRows,
)
from kvferry.kernels.block_moves import Overlay
from kvferry.kernels.coded_weights import CodedWeight
from kvferry.kernels.logit_rows import Adjustments, Draws

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A projection with its weights: maps [T, in] to [T, out]."""


class CodedProjection(Protocol):
    """A `Linear` with coded weights."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        ...


AttentionPlan = object
"""Plan of a step's attention, used in every layer; its type depends on the backend."""


def _runs_anywhere(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations of a kernel backend that models use."""

    name: str

    pack_linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    """Build a projection: (weight [out, in], bias [out] or `None`) -> `Linear`, which may keep a copy of the weight in
    a different layout."""

    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Look up embeddings: (token ids [T] int64, table [vocabulary, hidden]) -> [T, hidden]."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """Normalize rows: (x [..., n], weight [n], epsilon) -> x / rms(x) * weight (Zhang and Sennrich, RMSNorm, 2019)."""

    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    """Add x to the residual IN PLACE and normalize the sum: (x, residual, weight, epsilon) -> `rms_norm` of the sum."""

    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """Apply the rotary embedding IN PLACE: (x [T, heads, D], cos [T, D], sin [T, D], both float32) -> `None`. Pairs are
    (i, i + D/2) (Su et al., RoFormer, 2021); x becomes x * cos + (halves of x swapped) * sin, where the first half of
    `sin` is negated."""

    write_kv: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    """Write each row's key and value to its slot: (kv [T, 2, K, D], pages, layer, slots [T]) -> `None`; with pages of
    latent vectors, kv is [T, 1, 1, D]."""

    place_qkv: Callable[
        [torch.Tensor, HeadNorms | None, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None
    ]
    """Apply `rms_norm` to each query and key head if norms are given, then `rotate` to both, then `write_kv`: (qkv [T,
    H + 2 K, D], norms or `None`, cos, sin, pages, layer, slots) -> `None`. The queries are updated in `qkv`; its keys
    and values are undefined afterwards."""

    plan_attention: Callable[[AttentionBatch, torch.Tensor, int], AttentionPlan]
    """Plan a step's attention: (batch, pages, H) -> plan for `paged_attention` in all layers."""

    paged_attention: Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, float], torch.Tensor]
    """Compute causal attention of each row over its sequence's pages: (q [T, H, D], pages, layer, plan, scale) -> [T, H
    * D]. Keys and values of this step are included and must have been written. Slots beyond a sequence's context have
    no effect, even if they contain NaN. Query head h reads KV head h // (H / K)."""

    attend: Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, AttentionRules], torch.Tensor]
    """Like `paged_attention`, but with sliding window, soft cap and sinks."""

    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    """Multiply silu of the first half of each row by the second half: ([T, 2 n]) -> [T, n] (Shazeer, SwiGLU, 2020)."""

    gelu_mul: Callable[[torch.Tensor], torch.Tensor]
    """Multiply GELU of the first half of each row, in its tanh approximation, by the second half: ([T, 2 n]) -> [T, n]
    (Hendrycks and Gimpel, GELU, 2016; Shazeer, GeGLU, 2020)."""

    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Gather rows by index: (x [T, n], row indices [R] int64) -> [R, n]."""

    add_low_rank: Callable[[torch.Tensor, torch.Tensor, Sequence[LowRankGroup]], None] | None = None
    """Add the updates of adapters to a projection's outputs IN PLACE: (y [T, out], x [T, in], groups) -> `None`. For
    each group, the columns of its weights are updated in its rows; the rank-sized product is computed in at least
    float32. `None` if the backend does not support adapters."""

    place_latent: (
        Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]
        | None
    ) = None
    """Write latent vectors to pages: (vectors [T, rank + R], norm weight [rank], epsilon, cos [T, R], sin [T, R],
    pages, layer, slots) -> `None`. The first `rank` elements of a vector are replaced by their `rms_norm`, the others
    are rotated as by `rotate`; `vectors` is undefined afterwards. `None` if the backend does not support latent
    attention."""

    attend_latent: Callable[[torch.Tensor, LatentUp, torch.Tensor, int, AttentionPlan, float], torch.Tensor] | None = (
        None
    )
    """Compute causal attention over pages of latent vectors, [pages, layers, 1, 1, B, rank + R]: (q [T, H, plain + R],
    projections, pages, layer, plan, scale) -> [T, H * value]. A head's key is the projection of the first `rank`
    elements of a vector, followed by the vector's last R elements, which were rotated; a head's value is a projection
    of the first `rank` elements. `None` if the backend does not support latent attention."""

    run_experts: (
        Callable[
            [torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights, Callable[[torch.Tensor], torch.Tensor]],
            torch.Tensor,
        ]
        | None
    ) = None
    """Compute the weighted sum of each row's experts without host synchronization: (x [T, hidden], chosen experts [T,
    A] int64, distinct within a row, their weights [T, A] float32, matrices, gate function [P, 2 n] to [P, n]) -> [T,
    hidden]. `None` if models apply each expert's projections to its rows separately."""

    pack_codes: Callable[[CodedWeight, torch.Tensor | None], CodedProjection | str] | None = None
    """Build a projection whose weights stay codes in memory: (weight, bias [out] or `None`) -> projection, or the
    reason why the kernels do not support the weight, as a clause. `None` if the backend dequantizes all weights."""

    why_not: Callable[[torch.device], str | None] = _runs_anywhere
    """Map a device to the reason why this backend cannot run on it, with a remedy; `None` if it can."""


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """Operations of a runner that does not synchronize with the host between steps."""

    attend: Callable[[torch.Tensor, torch.Tensor, int, AttentionPlan, AttentionRules], torch.Tensor]
    """`Ops.attend`, which also accepts plans of `plan_rows`. `Ops.attend_latent` of a backend with
    `DeviceOps` accepts plans of `plan_rows`."""

    plan_rows: Callable[[SingleRows, torch.Tensor, int], AttentionPlan]
    """Plan attention for rows that are described on the device: (rows, pages, H) -> plan that reads block tables and
    lengths at each launch; the host needs only shapes. The results equal those with `Ops.plan_attention`."""

    adjust_logits: Callable[[torch.Tensor, Adjustments], torch.Tensor]
    """Apply bias, penalties and bans, in the order of the sampler: (logits [R, V] float32, adjustments) -> [R, V]
    float64."""

    sample: Callable[[torch.Tensor, Draws], torch.Tensor]
    """Sample tokens: (logits [R, V] float32 or float64, draws) -> ids [R] int64, equal to the result of
    `engine.execute.run.sampler.draw`."""

    log_probabilities: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Compute natural log-probabilities of tokens: (logits [R, V] float32, token ids [R]) -> [R] float64."""

    gather_blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Copy pages to contiguous memory: (pages, blocks [N] int64) -> [N, layers, 2, K, B, D]."""

    scatter_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """Copy staged pages to the pool, the inverse of `gather_blocks`: (staged [N, layers, 2, K, B, D], pages, blocks
    [N]) -> `None`."""

    relayout_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Overlay], torch.Tensor]
    """Copy the common tokens from staged pages, which have a different block size, dtype or range of heads, to the
    target blocks, and write nothing else: (staged [n, layers, 2, k, b, D], pages, blocks [N] int64, overlay) -> [1]
    int32, the number of finite values outside the range of the target's dtype."""

    digest_blocks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Compute a 128-bit digest of each page: (pages, blocks [N] int64) -> [N, 2] int64. The digest detects corruption,
    but not forgery."""


def ops_for(device: torch.device | str, backend: str | None = None) -> Ops:
    """Return the `Ops` for a device.

    Args:
        device: device of the tensors.
        backend: one of `BACKENDS`; default: the fastest backend for the device.

    Raises:
        UsageError: the backend is unknown, or does not run on the device.
    """
    ops = _load(device, backend).OPS
    assert isinstance(ops, Ops)
    if reason := ops.why_not(torch.device(device)):
        raise UsageError(reason, field="kernels")
    return ops


def device_ops_for(device: torch.device | str, backend: str | None = None) -> DeviceOps:
    """Return the `DeviceOps` for a device.

    Raises:
        UsageError: the backend has no `DeviceOps`, or does not run on the device.
    """
    name = ops_for(device, backend).name
    found = getattr(_load(device, name), "DEVICE_OPS", None)
    if found is None:
        raise UsageError(f"the kernels {name!r} have no `DeviceOps`", field="kernels")
    assert isinstance(found, DeviceOps)
    return found


def _load(device: torch.device | str, backend: str | None) -> ModuleType:
    chosen = backend or backend_for(device)
    if chosen not in BACKENDS:
        raise UsageError(f"unknown kernel backend {chosen!r}; expected one of {', '.join(BACKENDS)}", field="kernels")
    try:
        return importlib.import_module(BACKENDS[chosen])
    except ModuleNotFoundError as error:
        if error.name != chosen:
            raise
        raise UsageError(
            f"the kernels {chosen!r} need the package {chosen}, which is not installed; install it, or use"
            " --kernels torch",
            field="kernels",
        ) from error
