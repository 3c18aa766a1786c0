"""Kernels of other libraries for comparison (torch, flash-attn, FlashInfer, Liger), imported only when used.

Keys and values are converted to each library's layout before the measurement, to the libraries' advantage: torch and
flash-attn get contiguous tensors; FlashInfer reads kvferry's pages in place.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvferry.bench.gpu.timing import Action
from kvferry.kernels.batch import LatentUp

Peers = Mapping[str, Callable[[], Action]]
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Inputs of attention over paged sequences of equal length."""

    q: torch.Tensor
    """Queries [T, H, D]."""
    pages: torch.Tensor
    """Pages with keys and values [pages, 1, 2, K, B, D]."""
    tables: npt.NDArray[np.int64]
    """Block tables [sequences, blocks]."""
    context: int
    scale: float

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values to contiguous tensors, each [sequences, K, context, D]."""
        order = torch.from_numpy(self.tables).to(self.pages.device)
        keys, values = (self.pages[:, 0, part][order].transpose(1, 2).flatten(2, 3) for part in (0, 1))
        return keys[:, :, : self.context].contiguous(), values[:, :, : self.context].contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Inputs of latent attention of one row per sequence over paged sequences of equal length."""

    q: torch.Tensor
    """Queries [T, H, plain + R]."""
    up: LatentUp
    pages: torch.Tensor
    """Pages with latent vectors [pages, 1, 1, 1, B, rank + R]."""
    tables: npt.NDArray[np.int64]
    """Block tables [sequences, blocks]."""
    context: int
    scale: float


def latent_decode(given: LatentAttention) -> Peers:
    """Return a factory of torch's action, which absorbs the queries and attends with all heads as rows over contiguous
    vectors.
    """

    def by_torch() -> Action:
        order = torch.from_numpy(given.tables).to(given.pages.device)
        vectors = given.pages[:, 0, 0, 0][order].flatten(1, 2)[:, None, : given.context].contiguous()
        _, plain, rank = given.up.keys.shape

        def run() -> torch.Tensor:
            absorbed = torch.einsum("thp,hpr->thr", given.q[..., :plain], given.up.keys)
            rows = torch.cat((absorbed, given.q[..., plain:]), dim=-1)[:, None]
            seen = F.scaled_dot_product_attention(rows, vectors, vectors[..., :rank], scale=given.scale)
            return torch.einsum("thr,hvr->thv", seen.squeeze(1), given.up.values)

        return run

    return {"torch": by_torch}


def decode_attention(given: Attention) -> Peers:
    """Return factories of decode attention actions (one row per sequence), by library."""

    def flash_attn() -> Action:
        module: Any = importlib.import_module("flash_attn")
        keys, values = (x.transpose(1, 2).contiguous() for x in given.dense())
        lengths = torch.full((len(keys),), given.context, dtype=torch.int32, device=keys.device)
        return lambda: module.flash_attn_with_kvcache(
            given.q[:, None], keys, values, cache_seqlens=lengths, softmax_scale=given.scale, causal=True
        )

    def flashinfer() -> Action:
        module: Any = importlib.import_module("flashinfer")
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=given.q.device)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        (sequences, blocks), (_, _, _, kv_heads, block_tokens, head_dim) = given.tables.shape, given.pages.shape
        starts = torch.arange(sequences + 1, dtype=torch.int32) * blocks
        last = torch.full((sequences,), given.context - (blocks - 1) * block_tokens, dtype=torch.int32)
        order = torch.from_numpy(given.tables.reshape(-1).astype(np.int32))
        wrapper.plan(
            *(x.to(given.q.device) for x in (starts, order, last)),
            given.q.shape[1],
            kv_heads,
            head_dim,
            block_tokens,
            q_data_type=given.q.dtype,
            kv_data_type=given.q.dtype,
            sm_scale=given.scale,
        )
        return lambda: wrapper.run(given.q, given.pages[:, 0])

    return {**_sdpa(given, is_causal=False), "flash-attn": flash_attn, "flashinfer": flashinfer}


def prefill_attention(given: Attention) -> Peers:
    """Return factories of prefill attention actions (all rows of a sequence, causal), by library."""

    def by_token() -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (x[0].transpose(0, 1).contiguous() for x in given.dense())
        return keys, values

    def flash_attn() -> Action:
        module: Any = importlib.import_module("flash_attn")
        keys, values = by_token()
        return lambda: module.flash_attn_func(
            given.q[None], keys[None], values[None], softmax_scale=given.scale, causal=True
        )

    def flashinfer() -> Action:
        module: Any = importlib.import_module("flashinfer")
        keys, values = by_token()
        return lambda: module.single_prefill_with_kv_cache(given.q, keys, values, causal=True, sm_scale=given.scale)

    return {**_sdpa(given, is_causal=True), "flash-attn": flash_attn, "flashinfer": flashinfer}


def _sdpa(given: Attention, *, is_causal: bool) -> Peers:
    """Return factories of actions with torch's scaled dot product attention, by backend."""

    def by(backend: SDPBackend | None) -> Callable[[], Action]:
        def made() -> Action:
            keys, values = given.dense()
            # [T, H, D] to [sequences, H, rows, D]
            q = given.q.view(len(keys), -1, *given.q.shape[1:]).transpose(1, 2)

            def run() -> torch.Tensor:
                with nullcontext() if backend is None else sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(
                        q, keys, values, is_causal=is_causal, scale=given.scale, enable_gqa=True
                    )
                return out.transpose(1, 2)

            return run

        return made

    if given.q.device.type == "cpu":
        return {"torch sdpa": by(None)}
    return {
        "torch sdpa flash": by(SDPBackend.FLASH_ATTENTION),
        "torch sdpa cudnn": by(SDPBackend.CUDNN_ATTENTION),
    }


def add_rms_norm(residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Peers:
    """Return factories of actions for RMSNorm fused with the residual addition, by library.

    Args:
        residual: [T, n]; it is copied, so that the actions do not change it.
        weight: [n].
        epsilon: number added to the mean square.
    """

    def flashinfer() -> Action:
        module: Any = importlib.import_module("flashinfer.norm")
        own, x = residual.clone(), torch.zeros_like(residual)

        def run() -> torch.Tensor:
            module.fused_add_rmsnorm(x, own, weight, epsilon)
            return x

        return run

    return {"flashinfer": flashinfer}


def silu_mul(gate_up: torch.Tensor) -> Peers:
    """Return factories of SiLU gating actions, by library. `gate_up` has gates and ups in one tensor; Liger needs two
    tensors.

    Args:
        gate_up: [T, 2 n], gates in the first half of each row.
    """

    def flashinfer() -> Action:
        module: Any = importlib.import_module("flashinfer.activation")
        return lambda: module.silu_and_mul(gate_up)

    def liger() -> Action:
        module: Any = importlib.import_module("liger_kernel.ops.swiglu")
        gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=1))
        return lambda: module.LigerSiLUMulFunction.apply(gate, up)

    return {"flashinfer": flashinfer, "liger": liger}


def sample(logits: torch.Tensor, top_k: int, top_p: float) -> Peers:
    """Return factories of actions that sample from logits, by library; each library uses its own random numbers.

    Args:
        logits: [R, V].
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: probability to keep, above 0 and at most 1, which keeps all.
    """

    def plain() -> Action:
        if top_k or top_p < 1.0:
            return lambda: _sorted_draw(logits, top_k, top_p)
        return lambda: torch.multinomial(logits.softmax(1), 1).squeeze(1)

    def flashinfer() -> Action:
        module: Any = importlib.import_module("flashinfer.sampling")
        if top_k or top_p < 1.0:
            return lambda: module.top_k_top_p_sampling_from_logits(logits, top_k or logits.shape[1], top_p)
        return lambda: module.sampling_from_logits(logits)

    return {"torch": plain, "flashinfer": flashinfer}


def _sorted_draw(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Sample after filtering by top-k and then by top-p."""
    kept, ids = logits.topk(top_k or logits.shape[1], dim=1)
    weights = kept.softmax(1)
    weights = weights.masked_fill(weights.cumsum(1) - weights >= top_p, 0.0)
    return ids.gather(1, torch.multinomial(weights, 1)).squeeze(1)
