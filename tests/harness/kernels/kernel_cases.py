"""Shared cases of kernel tests: ragged batches over scattered pages, and error tolerances."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvferry.kernels.batch import AttentionBatch
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import forward as reference

Cast = Callable[[torch.Tensor], torch.Tensor]
LAYERS = 3


def fair_error(exact: torch.Tensor, low: torch.Tensor) -> float:
    """Return the error tolerance: twice the reference's error in low precision plus 8 units in the last place."""
    unit = torch.finfo(low.dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
    return 2 * float((low.double() - exact).abs().max() if exact.numel() else 0.0) + 8 * unit


def assert_as_good_as_reference(
    run: Callable[[Any, Cast], torch.Tensor],
    dtype: torch.dtype,
    fast: Any,
    *,
    definition: Any = reference.OPS,
    device: torch.device | str = "cpu",
) -> None:
    """Check that a kernel backend is about as accurate as the reference implementation in the same data type.

    Args:
        run: function with parameters (operations, cast); it is called with the reference in float64, the reference in
            `dtype`, and the backend in `dtype`.
        dtype: data type of the backend's tensors.
        fast: operations of the backend.
        definition: operations of the reference.
        device: device of the backend; the reference runs on the CPU.
    """
    exact = run(definition, lambda t: t.to(dtype).double())
    low = run(definition, lambda t: t.to(dtype).clone())
    got = run(fast, lambda t: t.to(device=device, dtype=dtype, copy=True))
    assert got.dtype == dtype
    assert got.shape == exact.shape
    if exact.numel():
        assert float((got.cpu().double() - exact).abs().max()) <= fair_error(exact, low)


@dataclass(frozen=True)
class Case:
    """A ragged batch of sequences over randomly assigned pages."""

    pages: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    batch: AttentionBatch

    def to(self, device: torch.device | str) -> AttentionBatch:
        """Return a copy of the batch with its slots moved to `device`."""
        return replace(self.batch, slots=self.batch.slots.to(device))

    def used_slots(self) -> torch.Tensor:
        """Return a mask of the slots that sequences use, bool [pages, B]."""
        block_tokens = self.pages.shape[4]
        used = torch.zeros(self.pages.shape[0] * block_tokens, dtype=torch.bool)
        for context, table in zip(self.batch.contexts.tolist(), self.batch.block_tables, strict=True):
            positions = np.arange(context)
            used[table[positions // block_tokens] * block_tokens + positions % block_tokens] = True
        return used.view(-1, block_tokens)

    def poisoned(self) -> "Case":
        """Return a copy of the case with NaN in every unused slot."""
        unused = ~self.used_slots()[:, None, None, None, :, None]
        return replace(self, pages=self.pages.masked_fill(unused, torch.nan))


def make_case(
    shapes: Sequence[tuple[int, int]],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    seed: int,
    unused: int = 0,
    spare_columns: int = 0,
) -> Case:
    """Create a random case.

    Args:
        shapes: (number of queries, number of earlier tokens) of each sequence.
        kv_heads: number of KV heads.
        group: query heads per KV head.
        head_dim: values per head.
        block_tokens: tokens per page.
        seed: seed of all random values.
        unused: value of unused block table entries.
        spare_columns: extra columns of the block tables.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = np.array([q for q, _ in shapes])
    contexts = np.array([q + h for q, h in shapes])
    blocks = -(-contexts // block_tokens)
    spare = 3
    order = torch.randperm(int(blocks.sum()) + spare, generator=generator).numpy()
    table = np.full((len(shapes), int(blocks.max()) + spare_columns), unused, dtype=np.int64)
    used, slots = 0, []
    for i, n in enumerate(blocks):
        table[i, :n] = order[used : used + n]
        used += n
        positions = np.arange(contexts[i] - queries[i], contexts[i])
        slots.append(table[i, positions // block_tokens] * block_tokens + positions % block_tokens)
    rows = int(queries.sum())
    return Case(
        torch.randn(len(order), LAYERS, 2, kv_heads, block_tokens, head_dim, generator=generator),
        torch.randn(rows, kv_heads * group, head_dim, generator=generator),
        torch.randn(rows, 2, kv_heads, head_dim, generator=generator),
        AttentionBatch(queries, contexts, table, torch.from_numpy(np.concatenate(slots))),
    )


def attend(case: Case, ops: Ops, cast: Cast, layer: int = 1) -> torch.Tensor:
    """Write the case's keys and values to its pages, then compute attention for its queries."""
    pages = cast(case.pages)
    batch = case.to(pages.device)
    ops.write_kv(cast(case.kv), pages, layer, batch.slots)
    plan = ops.plan_attention(batch, pages, case.q.shape[1])
    return ops.paged_attention(cast(case.q), pages, layer, plan, 0.37)
