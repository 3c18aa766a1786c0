"""Benchmark cases: an operation with inputs on a device, its action, and the actions of other libraries.

A new action is created for each trial of a launch choice, because plans store their launch choice and some operations
modify their inputs. The first results are compared to check that two implementations compute the same values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from kvferry.bench.formulas.gpu_work import Spec
from kvferry.bench.gpu import peers
from kvferry.bench.gpu.timing import Action
from kvferry.core.dtypes import SCALE_BYTES
from kvferry.kernels.batch import AttentionBatch, LatentUp
from kvferry.kernels.coded_pages import coded_pages
from kvferry.kernels.logit_rows import Draws
from kvferry.kernels.ops import DeviceOps, Ops, device_ops_for, ops_for

_SEED = 1
_EPSILON = 1e-5
_SPREAD_OF_LOGITS = 4.0
_WRITTEN_ROWS = 1 << 16
"""Number of tokens whose keys and values are written at a time."""
_UNITS = 64
"""Maximum difference of two correct results, in units in the last place of the largest value."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The inputs and actions for a spec."""

    spec: Spec
    make: Callable[[], Action]
    """Function that creates an action of kvferry's kernels with new inputs."""
    peers: Mapping[str, Callable[[], Action]] = field(default_factory=dict)
    """Factories of other libraries' actions by name; a factory raises ImportError if the library is not installed."""
    is_comparable: bool = True
    """Whether peers must compute the same values; results of random sampling may differ."""


@dataclass(frozen=True, slots=True)
class _Setup:
    """Device, dtype and kernels of a case."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    more: DeviceOps
    plain: Ops

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(_SEED)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device).normal_(generator=generator)

    def whole(self, high: int, count: int) -> torch.Tensor:
        numbers = np.random.default_rng(_SEED).integers(0, high, count)
        return torch.from_numpy(numbers).to(self.device)

    def shuffled(self, count: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(_SEED).permutation(count)


def make_case(spec: Spec, device: torch.device, dtype: torch.dtype) -> Case:
    """Create a case for a spec, with random inputs.

    Raises:
        UsageError: the Triton backend does not run on the device.
    """
    here = _Setup(device, dtype, ops_for(device, "triton"), device_ops_for(device, "triton"), ops_for(device, "torch"))
    return _CASES[spec.op](spec, here)


def _decode(s: Spec, here: _Setup) -> Case:
    batch, context = s["batch"], s["context"]
    queries, contexts = np.ones(batch, np.int64), np.full(batch, context)
    return _attention(s, here, queries, contexts, peers.decode_attention)


def _coded_decode(s: Spec, here: _Setup) -> Case:
    """Create a case with KV in 8 bits; the kernels compute the codes from random values."""
    batch, context, tokens = s["batch"], s["context"], s["block_tokens"]
    blocks = -(-context // tokens)
    tables = here.shuffled(batch * blocks).reshape(batch, blocks)
    dims = (1, 2, s["kv_heads"], tokens, s["head_dim"])
    memory = torch.zeros(tables.size * 2 * s["kv_heads"] * tokens * (s["head_dim"] + SCALE_BYTES), dtype=torch.uint8)
    pages = coded_pages(memory.to(here.device), tables.size, dims, s.op.removeprefix("decode_"))
    for first in range(0, tables.size * tokens, _WRITTEN_ROWS):
        slots = torch.arange(first, min(first + _WRITTEN_ROWS, tables.size * tokens), device=here.device)
        here.ops.write_kv(here.normal(len(slots), 2, s["kv_heads"], s["head_dim"]), pages, 0, slots)
    queries, contexts = np.ones(batch, np.int64), np.full(batch, context)
    return _attention_over(s, here, pages, tables, queries, contexts, None)


def _prefill(s: Spec, here: _Setup) -> Case:
    queries, contexts = np.array([s["tokens"]]), np.array([s["tokens"] + s["history"]])
    # A chunk after a cached prefix needs a mask in torch, which then does not use its fast kernels.
    return _attention(s, here, queries, contexts, None if s["history"] else peers.prefill_attention)


def _attention(
    s: Spec,
    here: _Setup,
    queries: npt.NDArray[np.int64],
    contexts: npt.NDArray[np.int64],
    others: Callable[[peers.Attention], Mapping[str, Callable[[], Action]]] | None,
) -> Case:
    blocks = int(-(-contexts.max() // s["block_tokens"]))
    tables = here.shuffled(len(queries) * blocks).reshape(len(queries), blocks)
    pages = here.normal(tables.size, 1, 2, s["kv_heads"], s["block_tokens"], s["head_dim"])
    return _attention_over(s, here, pages, tables, queries, contexts, others)


def _attention_over(
    s: Spec,
    here: _Setup,
    pages: torch.Tensor,
    tables: npt.NDArray[np.int64],
    queries: npt.NDArray[np.int64],
    contexts: npt.NDArray[np.int64],
    others: Callable[[peers.Attention], Mapping[str, Callable[[], Action]]] | None,
) -> Case:
    q = here.normal(int(queries.sum()), s["heads"], s["head_dim"])
    slots = torch.zeros(len(q), dtype=torch.int64, device=here.device)
    batch, scale = AttentionBatch(queries, contexts, tables, slots), s["head_dim"] ** -0.5

    def make() -> Action:
        plan = here.ops.plan_attention(batch, pages, s["heads"])
        return lambda: here.ops.paged_attention(q, pages, 0, plan, scale)

    given = peers.Attention(q, pages, tables, int(contexts[0]), scale)
    return Case(s, make, others(given) if others else {})


def _latent_decode(s: Spec, here: _Setup) -> Case:
    batch, context, heads, rank = s["batch"], s["context"], s["heads"], s["rank"]
    blocks = -(-context // s["block_tokens"])
    tables = here.shuffled(batch * blocks).reshape(batch, blocks)
    pages = here.normal(tables.size, 1, 1, 1, s["block_tokens"], rank + s["rotated"])
    q = here.normal(batch, heads, s["plain"] + s["rotated"])
    up = LatentUp(*(rank**-0.5 * here.normal(heads, s[name], rank) for name in ("plain", "value")))
    queries, contexts = np.ones(batch, np.int64), np.full(batch, context)
    slots = torch.zeros(batch, dtype=torch.int64, device=here.device)
    described, scale = AttentionBatch(queries, contexts, tables, slots), q.shape[2] ** -0.5

    def make() -> Action:
        attend, plan = here.ops.attend_latent, here.ops.plan_attention(described, pages, heads)
        assert attend is not None
        return lambda: attend(q, up, pages, 0, plan, scale)

    return Case(s, make, peers.latent_decode(peers.LatentAttention(q, up, pages, tables, context, scale)))


def _add_rms_norm(s: Spec, here: _Setup) -> Case:
    residual, weight = here.normal(s["rows"], s["columns"]), here.normal(s["columns"])
    x = torch.zeros_like(residual)  # zeros, so that every run computes the same sum

    def make(ops: Ops) -> Callable[[], Action]:
        def made() -> Action:
            own = residual.clone()
            return lambda: ops.add_rms_norm(x, own, weight, _EPSILON)

        return made

    others = {"torch": make(here.plain), **peers.add_rms_norm(residual, weight, _EPSILON)}
    return Case(s, make(here.ops), others)


def _silu_mul(s: Spec, here: _Setup) -> Case:
    gate_up = here.normal(s["rows"], 2 * s["columns"])
    others = {"torch": lambda: lambda: here.plain.silu_mul(gate_up), **peers.silu_mul(gate_up)}
    return Case(s, lambda: lambda: here.ops.silu_mul(gate_up), others)


def _place_qkv(s: Spec, here: _Setup) -> Case:
    rows, tokens = s["rows"], s["block_tokens"]
    given = here.normal(rows, s["heads"] + 2 * s["kv_heads"], s["head_dim"])
    angles = here.normal(rows, s["head_dim"], dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.from_numpy(here.shuffled(rows)).to(here.device)

    def make(ops: Ops) -> Callable[[], Action]:
        def made() -> Action:
            qkv = given.clone()
            pages = given.new_zeros(-(-rows // tokens), 1, 2, s["kv_heads"], tokens, s["head_dim"])

            def run() -> torch.Tensor:
                ops.place_qkv(qkv, None, cos, sin, pages, 0, slots)
                return pages

            return run

        return made

    return Case(s, make(here.ops), {"torch": make(here.plain)})


def _embedding(s: Spec, here: _Setup) -> Case:
    table, ids = here.normal(s["vocabulary"], s["columns"]), here.whole(s["vocabulary"], s["rows"])
    others = {"torch": lambda: lambda: table.index_select(0, ids)}
    return Case(s, lambda: lambda: here.ops.gather_rows(table, ids), others)


def _sample(s: Spec, here: _Setup) -> Case:
    rows = s["rows"]
    logits = _SPREAD_OF_LOGITS * here.normal(rows, s["vocabulary"], dtype=torch.float32)
    ones = torch.ones(rows, dtype=torch.float64, device=here.device)
    whole = torch.arange(rows, device=here.device)
    draws = Draws(
        temperature=ones,
        top_k=torch.full_like(whole, s["top_k"]),
        top_p=ones * (s["top_p_percent"] / 100),
        min_p=torch.zeros_like(ones),
        seed=whole + 7,
        stream=torch.zeros_like(whole),
        position=whole + 100,
    )
    others = peers.sample(logits, s["top_k"], s["top_p_percent"] / 100)
    return Case(s, lambda: lambda: here.more.sample(logits, draws), others, is_comparable=False)


def _log_probabilities(s: Spec, here: _Setup) -> Case:
    logits = _SPREAD_OF_LOGITS * here.normal(s["rows"], s["vocabulary"], dtype=torch.float32)
    tokens = here.whole(s["vocabulary"], s["rows"])
    others = {"torch": lambda: lambda: logits.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)}
    return Case(s, lambda: lambda: here.more.log_probabilities(logits, tokens), others)


def _blocks(s: Spec, here: _Setup) -> Case:
    count, more = s["blocks"], here.more
    pages = here.normal(2 * count, s["layers"], 2, s["kv_heads"], s["block_tokens"], s["head_dim"])
    order = torch.from_numpy(here.shuffled(2 * count)).to(here.device)
    sources, targets = order[:count].contiguous(), order[count:].contiguous()
    staged = pages.index_select(0, sources)

    def scattered() -> torch.Tensor:
        more.scatter_blocks(staged, pages, targets)
        return pages

    ours: dict[str, Action] = {
        "gather_blocks": lambda: more.gather_blocks(pages, sources),
        "scatter_blocks": scattered,
        "digest_blocks": lambda: more.digest_blocks(pages, sources),
    }
    theirs: dict[str, Action] = {
        "gather_blocks": lambda: pages.index_select(0, sources),
        "scatter_blocks": lambda: pages.index_copy_(0, targets, staged),
    }
    others = {"torch": lambda: theirs[s.op]} if s.op in theirs else {}
    return Case(s, lambda: ours[s.op], others)


_CASES: Mapping[str, Callable[[Spec, _Setup], Case]] = MappingProxyType(
    {
        "decode_attention": _decode,
        "decode_int8": _coded_decode,
        "decode_fp8": _coded_decode,
        "prefill_attention": _prefill,
        "latent_decode": _latent_decode,
        "add_rms_norm": _add_rms_norm,
        "silu_mul": _silu_mul,
        "place_qkv": _place_qkv,
        "embedding": _embedding,
        "gather_rows": _embedding,
        "sample": _sample,
        "log_probabilities": _log_probabilities,
        "gather_blocks": _blocks,
        "scatter_blocks": _blocks,
        "digest_blocks": _blocks,
    }
)


def differs(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Describe the difference between two results; return `None` if they have the same number of values, in any shape,
    and are equal up to rounding.

    Args:
        got: the result to check.
        expected: the reference.
    """
    one, other = got.detach().reshape(-1), expected.detach().reshape(-1)
    if one.numel() != other.numel():
        return f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    if not (got.is_floating_point() and expected.is_floating_point()):
        count = int((one != other).sum())
        return f"{count} of {other.numel()} numbers differ" if count else None
    unit = max(torch.finfo(x.dtype).eps for x in (got, expected))
    allowed = _UNITS * unit * float(other.abs().max())
    worst = float((one.double() - other.double()).abs().max())
    return None if worst <= allowed else f"the maximum difference {worst:.3g} exceeds the tolerance {allowed:.3g}"
