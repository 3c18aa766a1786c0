"""Latent vectors are written to their pages as by the separate operations, and their pages are copied like others."""

import pytest
import torch
from harness.kernels.kernel_cases import LAYERS, Cast, assert_as_good_as_reference

from kvferry.kernels.block_moves import Overlay
from kvferry.kernels.gpu.backend import DEVICE_OPS, OPS
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.ops import DeviceOps, Ops, ops_for
from kvferry.kernels.reference import forward as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK_TOKENS = 4


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("rank", "rotated"), [(512, 64), (33, 6), (1, 1 + 2)], ids=str)
@pytest.mark.parametrize("family", ["triton", "torch"])
def test_vectors_are_normalized_rotated_and_written(
    device: torch.device, family: str, rank: int, rotated: int, dtype: torch.dtype
) -> None:
    rotated += rotated % 2
    fast = OPS if family == "triton" else ops_for("cpu", "torch")
    where = device if family == "triton" else torch.device("cpu")
    rank += (rank + rotated) % 2
    vectors, weight, angles = drawn(3, rank + rotated), drawn(rank), drawn(3, rotated)
    slots = torch.tensor([0, 19, 7])

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        pages = cast(torch.zeros(5, LAYERS, 1, 1, BLOCK_TOKENS, rank + rotated))
        at = pages.device
        assert ops.place_latent is not None
        wide = torch.cat((cast(vectors), cast(vectors)), dim=1)[:, : rank + rotated]  # a view with longer rows
        ops.place_latent(wide, cast(weight), 1e-6, angles.cos().to(at), angles.sin().to(at), pages, 1, slots.to(at))
        assert int((pages != 0).sum()) <= vectors.numel()
        return pages

    assert_as_good_as_reference(run, dtype, fast, device=where)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("backend", [OPS, reference.OPS], ids=lambda ops: ops.name)
def test_padding_writes_nowhere(device: torch.device, backend: Ops, has_norm: bool) -> None:
    where = device if backend is OPS else torch.device("cpu")
    pages = torch.full((3, 2, 1, 1, BLOCK_TOKENS, 10), torch.nan, device=where)
    vectors, slots = drawn(3, 10).to(where), torch.tensor([-1, 6, -1], device=where)
    angles = torch.ones(3, 4, device=where)
    if has_norm:
        assert backend.place_latent is not None
        backend.place_latent(vectors, torch.ones(6, device=where), 1e-6, angles, angles, pages, 1, slots)
    else:
        backend.write_kv(vectors[:, None, None], pages, 1, slots)
        assert torch.equal(pages[1, 1, 0, 0, 2], vectors[1])
    written = ~pages.isnan()
    assert written[1, 1, :, :, 2].all()
    assert int(written.sum()) == 10


def test_slots_beyond_31_bits_are_written(device: torch.device) -> None:
    wide = torch.empty_strided((3, 1, 1, 1, 2, 8), (1 << 30, 16, 16, 16, 8, 1), dtype=torch.float16, device=device)
    vectors = drawn(1, 8).half().to(device)
    OPS.write_kv(vectors[:, None, None], wide, 0, torch.tensor([5], device=device))
    assert torch.equal(wide[2, 0, 0, 0, 1], vectors[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_pages_are_copied_digested_and_converted(device: torch.device, dtype: torch.dtype) -> None:
    pages = drawn(6, LAYERS, 1, 1, BLOCK_TOKENS, 24).to(dtype)
    sources, targets = torch.tensor([4, 1]), torch.tensor([0, 5])

    def run(ops: DeviceOps, where: torch.device) -> tuple[torch.Tensor, ...]:
        here = pages.to(where, copy=True)
        some, others = sources.to(where), targets.to(where)
        ops.scatter_blocks(ops.gather_blocks(here, some), here, others)
        staged = ops.gather_blocks(here, others)
        ops.scatter_blocks(staged, here, torch.tensor([2, 3], device=where))
        # Values of 7 tokens go to the first page; writes beyond it would change the second.
        larger = torch.zeros(3, LAYERS, 1, 1, 2 * BLOCK_TOKENS, 24, dtype=dtype, device=where)
        lost = ops.relayout_blocks(staged, larger, torch.tensor([0], device=where), Overlay(0, 0, 0, 7))
        return here, staged, larger, lost, ops.digest_blocks(here, some)

    ours, theirs = run(DEVICE_OPS, device), run(reference.DEVICE_OPS, torch.device("cpu"))
    assert int((theirs[2] != 0).sum()) == LAYERS * 7 * 24
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got.cpu(), expected)


def test_bad_vectors_are_refused_by_name() -> None:
    pages, slots, angles = torch.zeros(2, 1, 1, 1, 4, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)
    assert OPS.place_latent is not None
    for vectors, norm, message in (
        (torch.zeros(2, 8), torch.zeros(8), r"vectors: the shape must be \[T, 8 \+ R\], not \(2, 8\)"),
        (torch.zeros(2, 8), torch.zeros(4).half(), "norm: torch.float16 does not match torch.float32"),
        (torch.zeros(2, 10), torch.zeros(4), "cos: the shape must be"),
        (torch.zeros(3, 8), torch.zeros(4), "cos: the shape must be"),
    ):
        with pytest.raises(BadKernelInput, match=message):
            OPS.place_latent(vectors, norm, 1e-6, angles, angles, pages, 0, slots)
    with pytest.raises(BadKernelInput, match=r"kv: the shape must be \(2, 1, 1, 8\), not \(2, 1, 1, 6\)"):
        OPS.write_kv(torch.zeros(2, 1, 1, 6), pages, 0, slots)
