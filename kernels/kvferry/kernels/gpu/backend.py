"""Operation tables of the Triton backend. Projections use cuBLAS through torch, unless their weights are codes."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from kvferry.kernels.gpu import blocks, device, digest, heads, norms, rows
from kvferry.kernels.gpu.attention import attend, plan
from kvferry.kernels.gpu.experts import products
from kvferry.kernels.gpu.latent import attend as latent_attend
from kvferry.kernels.gpu.latent import place
from kvferry.kernels.gpu.sampling import draw, logits
from kvferry.kernels.gpu.weights.products import pack_codes
from kvferry.kernels.ops import DeviceOps, Linear, Ops
from kvferry.kernels.unfused import gelu_mul


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """See `Ops.pack_linear`. Projections use cuBLAS through torch."""
    return lambda x: F.linear(x, weight, bias)


OPS = Ops(
    name="triton",
    pack_linear=pack_linear,
    embedding=rows.embedding,
    rms_norm=norms.rms_norm,
    add_rms_norm=norms.add_rms_norm,
    rotate=heads.rotate,
    write_kv=place.write_kv,
    place_qkv=heads.place_qkv,
    plan_attention=plan.plan_attention,
    paged_attention=attend.paged_attention,
    attend=attend.attend,
    silu_mul=rows.silu_mul,
    gelu_mul=gelu_mul,
    gather_rows=rows.take_rows,
    add_low_rank=rows.add_low_rank,
    place_latent=place.place_latent,
    attend_latent=latent_attend.attend_latent,
    run_experts=products.run_experts,
    pack_codes=pack_codes,
    why_not=device.why_not,
)

DEVICE_OPS = DeviceOps(
    attend=attend.attend,
    plan_rows=plan.plan_rows,
    adjust_logits=logits.adjust_logits,
    sample=draw.sample,
    log_probabilities=logits.log_probabilities,
    gather_blocks=blocks.gather_blocks,
    scatter_blocks=blocks.scatter_blocks,
    relayout_blocks=blocks.relayout_blocks,
    digest_blocks=digest.digest_blocks,
)
