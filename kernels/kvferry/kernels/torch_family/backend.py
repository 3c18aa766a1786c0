"""Operation tables of the torch backend: a few large torch calls per layer, without a Python loop over decode
sequences.

Projections use oneDNN's packed weights. Torch's default float32 path on the CPU is MKL's, which on an AMD EPYC
(Zen 5, 2 cores) reads a [49152, 576] matrix at 16 GB/s for one row; with packed weights it is read at 55 GB/s, and 512
rows run at 490 instead of 200 GFLOP/s. With bfloat16, packed weights are 2.5 times as fast for 2 to 16 rows. The module
`attention` implements paged attention.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from kvferry.kernels.batch import LowRankGroup
from kvferry.kernels.ops import Linear, Ops
from kvferry.kernels.torch_family import attention, latent
from kvferry.kernels.unfused import gelu_mul, place_latent_of, place_qkv_of

_PACKED_FOR_ROWS = 64
"""Number of rows by which oneDNN selects the layout; values from 1 to 512 were measured to be equally fast."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Build a projection: in oneDNN's packed layout on a CPU, in plain torch on other devices and for unsupported
    dtypes.

    Args:
        weight: [out, in].
        bias: [out]; `None` without a bias.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return lambda x: F.linear(x, weight, bias)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda x: F.linear(x, weight, bias)
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return lambda x: F.linear(x, weight, bias)  # the CPU has no AVX-512
    # torch.compile generates these calls for frozen weights.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    run = torch.ops.mkldnn._linear_pointwise.default

    def project(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = run(x, packed, bias, "none", [], "")
        return y

    return project


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    residual.add_(x)
    return F.rms_norm(residual, (x.shape[-1],), weight, epsilon)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if x.dtype == torch.float32:
        swapped = x.roll(half, -1)
        x.mul_(cos).addcmul_(swapped, sin)
    else:
        wide = x.float()
        swapped = wide.roll(half, -1)
        x.copy_(wide.mul_(cos).addcmul_(swapped, sin))


def write_kv(kv: torch.Tensor, pages: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    block_tokens = pages.shape[4]
    page, place = slots // block_tokens, slots % block_tokens
    pages[:, layer].permute(0, 3, 1, 2, 4).index_put_((page, place), kv)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def add_low_rank(y: torch.Tensor, x: torch.Tensor, groups: Sequence[LowRankGroup]) -> None:
    for group in groups:
        weights = group.weights
        shrunk = F.linear(x.index_select(0, group.rows).float(), weights.a.float())
        update = F.linear(shrunk, weights.b.float()).to(y.dtype)
        y[:, weights.first : weights.first + len(weights.b)].index_add_(0, group.rows, update)


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, rows)


OPS = Ops(
    name="torch",
    pack_linear=pack_linear,
    embedding=F.embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotate=rotate,
    write_kv=write_kv,
    place_qkv=place_qkv_of(rms_norm, rotate, write_kv),
    plan_attention=attention.plan_attention,
    paged_attention=attention.paged_attention,
    attend=attention.attend,
    silu_mul=silu_mul,
    gelu_mul=gelu_mul,
    gather_rows=gather_rows,
    add_low_rank=add_low_rank,
    place_latent=place_latent_of(rms_norm, rotate, write_kv),
    attend_latent=latent.attend_latent,
)
