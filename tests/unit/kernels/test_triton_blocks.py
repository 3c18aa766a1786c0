"""Whole blocks: copied, gathered, converted and digested as defined; no byte outside of them is changed."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.block_moves import Overlay, runs
from kvferry.kernels.gpu.backend import DEVICE_OPS
from kvferry.kernels.ops import DeviceOps
from kvferry.kernels.reference import forward as reference
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import plan as plan_relayout

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEW = settings(max_examples=25, deadline=None)


def pool(blocks: int, *, heads: int = 2, tokens: int = 3, head_dim: int = 6, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(blocks, 2, 2, heads, tokens, head_dim).to(dtype)


@FEW
@given(st.permutations(range(7)), st.integers(0, 3), st.sampled_from(DTYPES))
def test_gather_and_scatter(device: torch.device, order: list[int], count: int, dtype: torch.dtype) -> None:
    sources, targets = (
        torch.tensor(order[:count], dtype=torch.int64),
        torch.tensor(order[count : 2 * count], dtype=torch.int64),
    )
    pages = pool(7, dtype=dtype)

    def run(ops: DeviceOps, at: torch.device | str) -> list[torch.Tensor]:
        here, there, p = sources.to(at), targets.to(at), pages.to(at, copy=True)
        staged = ops.gather_blocks(p, here)
        q = torch.zeros_like(p)
        ops.scatter_blocks(staged, q, there)
        return [p.cpu(), staged.cpu(), q.cpu()]

    for got, expected in zip(run(DEVICE_OPS, device), run(reference.DEVICE_OPS, "cpu"), strict=True):
        assert torch.equal(got, expected)


@FEW
@given(
    source=st.sampled_from(DTYPES),
    target=st.sampled_from(DTYPES),
    theirs=st.integers(1, 6),
    ours=st.integers(1, 6),
    heads=st.integers(1, 3),
    spare_heads=st.integers(0, 2),
    tokens=st.integers(1, 20),
    first=st.integers(0, 3),
    data=st.data(),
)
def test_relayout_equals_the_planned_copy(
    device: torch.device,
    source: torch.dtype,
    target: torch.dtype,
    theirs: int,
    ours: int,
    heads: int,
    spare_heads: int,
    tokens: int,
    first: int,
    data: st.DataObject,
) -> None:
    names = {d: str(d).removeprefix("torch.") for d in DTYPES}
    total, first_kv_head = heads + spare_heads, data.draw(st.integers(0, spare_heads))
    blocks = -(-tokens // ours)
    first = min(first, blocks - 1)
    order = data.draw(st.permutations(range(blocks - first + 2)))[: blocks - first]
    given_layout = KvLayout("m", names[source], 2, total, 6, theirs)
    wanted_layout = KvLayout("m", names[target], 2, heads, 6, ours, first_kv_head, total)
    relayout = plan_relayout(given_layout, wanted_layout)
    needed = relayout.source_blocks(first, len(order), tokens)
    staged = pool(len(needed), heads=total, tokens=theirs, dtype=source)
    blank = torch.full((blocks - first + 2, 2, 2, heads, ours, 6), 7.0, dtype=target)

    expected = blank.clone()
    raw = memoryview(staged.contiguous().view(torch.uint8).numpy().reshape(-1))
    relayout.convert(raw, needed, expected.view(torch.uint8).numpy().reshape(len(blank), -1), order, first, tokens)

    overlay = Overlay(needed.start * theirs, first * ours, first_kv_head, tokens)
    for ops, at in ((DEVICE_OPS, device), (reference.DEVICE_OPS, torch.device("cpu"))):
        got = blank.to(at, copy=True)
        lost = ops.relayout_blocks(staged.to(at), got, torch.tensor(order, device=at), overlay)
        assert int(lost) == 0
        # The interpreter truncates to bfloat16 instead of rounding, so the last place may differ; all else is exact.
        is_cut = target is torch.bfloat16 and source is not torch.bfloat16
        torch.testing.assert_close(got.cpu(), expected, rtol=2**-7 if is_cut else 0, atol=0)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_values_that_a_type_cannot_hold_are_counted(device: torch.device, backend: str) -> None:
    at, ops = (device, DEVICE_OPS) if backend == "triton" else (torch.device("cpu"), reference.DEVICE_OPS)
    staged = torch.zeros(1, 1, 2, 1, 4, 2)
    staged.view(-1)[:5] = torch.tensor([65519.0, 65520.0, -1e9, torch.inf, torch.nan])
    pages = torch.zeros(1, 1, 2, 1, 4, 2, dtype=torch.float16, device=at)
    with np.errstate(over="ignore"):
        lost = ops.relayout_blocks(staged.to(at), pages, torch.tensor([0], device=at), Overlay(0, 0, 0, 4))
    assert int(lost) == 2


@FEW
@given(st.lists(st.integers(0, 4), max_size=5), st.sampled_from(DTYPES), st.integers(1, 3))
def test_digests_are_the_definition_s(device: torch.device, blocks: list[int], dtype: torch.dtype, tokens: int) -> None:
    pages, order = pool(5, tokens=tokens, dtype=dtype), torch.tensor(blocks, dtype=torch.int64)
    got = DEVICE_OPS.digest_blocks(pages.to(device), order.to(device))
    assert torch.equal(got.cpu(), reference.DEVICE_OPS.digest_blocks(pages, order))


def test_a_digest_equals_its_definition_in_python() -> None:
    """Compare with the definition of the digest in Python integers."""
    pages = torch.arange(16.0).view(1, 1, 2, 1, 4, 2)
    words = np.arange(16, dtype=np.float32).view(np.uint32).tolist()

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    expected = [
        sum(mix((w + (i << 32) + salt) % 2**64) for i, w in enumerate(words)) % 2**64
        for salt in (0x243F6A8885A308D3, 0x13198A2E03707344)
    ]
    got = reference.DEVICE_OPS.digest_blocks(pages, torch.tensor([0]))[0].tolist()
    assert [g % 2**64 for g in got] == expected


def test_any_changed_word_or_two_that_change_places_change_a_digest() -> None:
    page = pool(1, dtype=torch.float32)
    block = torch.tensor([0])
    seen = {tuple(reference.DEVICE_OPS.digest_blocks(page, block)[0].tolist())}
    for at in range(page.numel()):
        other, turned = page.clone(), page.clone()
        other.view(torch.int32).view(-1)[at] ^= 1
        turned.view(-1)[at], turned.view(-1)[at - 1] = page.view(-1)[at - 1], page.view(-1)[at]
        seen |= {tuple(reference.DEVICE_OPS.digest_blocks(p, block)[0].tolist()) for p in (other, turned)}
    assert len(seen) == 1 + 2 * page.numel()


@given(st.lists(st.integers(0, 9), max_size=12))
def test_runs_cover_the_list_and_are_maximal(blocks: list[int]) -> None:
    found = runs(blocks)
    assert [b for r in found for b in range(r.first, r.first + r.count)] == blocks
    assert [a for r in found for a in range(r.at, r.at + r.count)] == list(range(len(blocks)))
    assert all(a.first + a.count != b.first for a, b in itertools.pairwise(found))
