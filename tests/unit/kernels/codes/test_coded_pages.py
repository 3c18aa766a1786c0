"""KV in 8 bits on the Triton backend: the bytes of the host's conversion, and attention over its values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.kernel_cases import LAYERS, Case, fair_error, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels.batch import AttentionRules, HeadNorms
from kvferry.kernels.coded_pages import CODES, coded_pages, page_bytes, scales_of
from kvferry.kernels.gpu.attention.attend import attend
from kvferry.kernels.gpu.attention.plan import plan_attention
from kvferry.kernels.gpu.backend import DEVICE_OPS, OPS
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.reference import forward as reference
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import plan as plan_relayout
from kvferry.model import tiny
from kvferry.weights.config import Latent

CODED = sorted(CODES)
BF16 = torch.bfloat16


def layout_of(dtype: str, pages: torch.Tensor) -> KvLayout:
    _, layers, _, heads, tokens, head_dim = pages.shape
    return KvLayout("", dtype, layers, heads, head_dim, tokens)


def empty(pages: torch.Tensor, dtype: str, device: torch.device | str, *, fill: int = 0) -> torch.Tensor:
    """Return coded pages of the shape of `pages`, filled with a byte."""
    size = len(pages) * layout_of(dtype, pages).block_bytes
    return coded_pages(torch.full((size,), fill, dtype=torch.uint8, device=device), len(pages), pages.shape[1:], dtype)


def converted(pages: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Convert pages by the host's conversion of layouts; return their bytes, [pages, bytes] uint8."""
    given, wanted = layout_of(source, pages), layout_of(target, pages)
    memory = np.zeros((len(pages), wanted.block_bytes), np.uint8)
    blocks, tokens = range(len(pages)), len(pages) * wanted.block_tokens
    rows = memoryview(page_bytes(pages).cpu().numpy().reshape(-1).data)
    plan_relayout(given, wanted).convert(rows, blocks, memory, list(blocks), 0, tokens)
    return torch.from_numpy(memory)


def coded(pages: torch.Tensor, dtype: str, device: torch.device | str) -> torch.Tensor:
    """Convert float32 pages to codes."""
    memory = converted(pages.contiguous(), "float32", dtype).to(device)
    return coded_pages(memory, len(pages), pages.shape[1:], dtype)


def decoded(pages: torch.Tensor, dtype: str) -> torch.Tensor:
    """Convert codes to float32 pages."""
    return converted(pages, dtype, "float32").view(torch.float32).view(pages.shape)


@pytest.mark.parametrize("dtype", CODED)
@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 12, 16, 64]),
    block_tokens=st.sampled_from([1, 4, 5, 16]),
    rows=st.integers(1, 6),
    size=st.sampled_from([1.0, 1e-32, 1e30]),
    seed=st.integers(0, 1000),
)
def test_written_bytes_are_those_of_the_conversion(
    device: torch.device, dtype: str, heads: int, head_dim: int, block_tokens: int, rows: int, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (4, LAYERS, 2, heads, block_tokens, head_dim)
    kv = (torch.randn(rows, 2, heads, head_dim, generator=generator) * size).to(BF16)
    kv[:, :, :, 0] = 0.0
    slots = torch.randperm(4 * block_tokens, generator=generator)[:rows]
    expected = torch.zeros(shape)
    reference.write_kv(kv[: len(slots)].float(), expected, 1, slots)
    pages = empty(expected, dtype, device)
    OPS.write_kv(kv[: len(slots)].to(device), pages, 1, slots.to(device))
    assert torch.equal(page_bytes(pages).cpu(), converted(expected, "float32", dtype))


@pytest.mark.parametrize("dtype", CODED)
def test_rotated_keys_and_values_are_written_as_without_codes(device: torch.device, dtype: str) -> None:
    rows, heads, kv_heads, head_dim = 5, 4, 2, 16
    qkv, weight = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(BF16), torch.randn(head_dim).to(BF16)
    slots = torch.tensor([3, -1, 7, 0, 11])
    cos, sin = (torch.randn(rows, head_dim).to(device) for _ in range(2))
    plain = torch.zeros(3, LAYERS, 2, kv_heads, 4, head_dim, dtype=BF16)
    pages = empty(plain, dtype, device)
    given, norms = [], HeadNorms(weight.to(device), weight.to(device), 1e-6)
    for target in (plain.to(device), pages):
        given.append(qkv.to(device, copy=True))
        OPS.place_qkv(given[-1], norms, cos, sin, target, 2, slots.to(device))
        plain = target.cpu() if target is not pages else plain
    assert torch.equal(given[0][:, :heads], given[1][:, :heads])
    assert torch.equal(page_bytes(pages).cpu(), converted(plain.float(), "float32", dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", CODED)
def test_a_row_that_is_not_finite_has_the_scale_nan(device: torch.device, dtype: str, bad: float) -> None:
    kv = torch.ones(2, 2, 1, 8, dtype=BF16, device=device)
    kv[1, 0, 0, 5] = bad
    pages = empty(torch.zeros(1, 1, 2, 1, 4, 8), dtype, device)
    OPS.write_kv(kv, pages, 0, torch.tensor([0, 1], device=device))
    scales = scales_of(pages)[0, 0, :, 0, :2].cpu()
    assert torch.isnan(scales).tolist() == [[False, True], [False, False]]


def assert_attends(case: Case, dtype: str, device: torch.device, rules: AttentionRules) -> None:
    """Check attention over codes against exact attention over their values."""
    pages = coded(case.pages, dtype, device)
    q, batch = case.q.to(BF16), case.to(device)
    values = decoded(pages, dtype)
    exact = reference.attend(q.double(), values.double(), 1, case.batch, rules)
    low = reference.attend(q, values.to(BF16), 1, case.batch, rules)
    # Slots that no sequence uses have codes and scales of ones in all bits, which is NaN in a scale.
    unused = torch.nonzero(~case.used_slots()).tolist()
    for page, slot in unused:
        pages.view(torch.uint8)[page, :, :, :, slot] = 255
        scales_of(pages)[page, :, :, :, slot] = torch.nan
    got = attend(q.to(device), pages, 1, plan_attention(batch, pages, q.shape[1]), rules)
    assert got.dtype == BF16
    assert float((got.cpu().double() - exact).abs().max()) <= fair_error(exact, low)


@pytest.mark.parametrize("dtype", CODED)
@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(
        st.one_of(st.tuples(st.just(1), st.integers(0, 70)), st.tuples(st.integers(1, 20), st.integers(0, 40))),
        min_size=1,
        max_size=3,
    ),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 12, 16]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    soft_cap=st.sampled_from([None, 30.0]),
    seed=st.integers(0, 1000),
)
def test_attention_over_codes(
    device: torch.device,
    dtype: str,
    shapes: list[tuple[int, int]],
    group: int,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    case = make_case(shapes, kv_heads=2, group=group, head_dim=head_dim, block_tokens=4, seed=seed)
    assert_attends(case, dtype, device, AttentionRules(0.37, window, soft_cap))


@pytest.mark.parametrize("dtype", CODED)
def test_partitions_over_codes(device: torch.device, dtype: str) -> None:
    case = make_case([(1, 700), (1, 650)], kv_heads=1, group=2, head_dim=64, block_tokens=16, seed=4)
    assert_attends(case, dtype, device, AttentionRules(0.2))


@pytest.mark.parametrize("dtype", CODED)
def test_pages_are_digested_with_their_scales(device: torch.device, dtype: str) -> None:
    pages = coded(torch.randn(4, LAYERS, 2, 2, 4, 16), dtype, device)
    page_bytes(pages)[3] = page_bytes(pages)[1]
    blocks = torch.tensor([1, 3], device=device)
    equal = DEVICE_OPS.digest_blocks(pages, blocks)
    scales_of(pages)[3, 0, 0, 0, 0] += 1.0
    changed = DEVICE_OPS.digest_blocks(pages, blocks)
    assert torch.equal(equal[0], equal[1])
    assert torch.equal(changed[0], equal[0])
    assert not torch.equal(changed[1], equal[1])


def test_what_has_no_codes_is_refused(device: torch.device) -> None:
    one = torch.zeros(1, dtype=torch.int64, device=device)
    pages = coded(torch.zeros(1, 1, 2, 1, 4, 8), "fp8", device)
    with pytest.raises(BadKernelInput, match=r"float8_e4m3fn is not one of float32, float16, bfloat16"):
        DEVICE_OPS.gather_blocks(pages, one)
    odd = empty(torch.zeros(1, 1, 2, 1, 1, 6), "int8", device)
    with pytest.raises(BadKernelInput, match="pages of 1 tokens and 6 codes have no aligned scales"):
        OPS.write_kv(torch.zeros(1, 2, 1, 6, device=device), odd, 0, one)


def tokens(dtype: str, kernels: str, device: torch.device | str, chunks: list[int]) -> list[list[int]]:
    config = tiny.config(qk_norm=True)
    model = build_model(config, tiny.TinyTensors(config), dtype=dtype, kernels=kernels, device=device)
    assert model.dtype == dtype
    kv = PagedKv.allocate(KvLayout.of(config, block_tokens=4, dtype=dtype), 64, device)
    turn = iter([*chunks, *[10_000] * 1000])
    made = generate(Runner(model, kv), [[5], list(range(100, 117))], 4, chunk=lambda _: next(turn))
    return [g.tokens[len(g.prompt) :] for g in made]


@pytest.mark.parametrize("dtype", CODED)
def test_an_engine_keeps_its_kv_in_codes(device: torch.device, dtype: str) -> None:
    expected = tokens(dtype, "triton", device, [])
    assert tokens(dtype, "triton", device, [1, 9, 3]) == expected
    near = tokens("bfloat16", "triton", device, [])
    assert sum(a == b for one, other in zip(expected, near, strict=True) for a, b in zip(one, other, strict=True)) > 4


@pytest.mark.parametrize(
    ("kernels", "latent", "message"),
    [
        ("torch", None, "fp8 KV needs the compiled kernels, but other kernels were requested, or the Triton kernels"),
        ("triton", Latent(64, 16, 32, 48, None), "latent vectors of the model family .* not fp8; use --dtype bfloat16"),
    ],
)
def test_codes_are_refused_with_the_reason(kernels: str, latent: Latent | None, message: str) -> None:
    config = replace(tiny.config(), latent=latent, head_dim=48)
    with pytest.raises(UsageError, match=message):
        build_model(config, tiny.TinyTensors(config), dtype="fp8", kernels=kernels)
