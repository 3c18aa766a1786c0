"""Projections with coded weights: products equal those of the dequantized weights, rows do not depend on their batch,
and nothing waits for the device.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness.kernels.coded_cases import coded_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.kernels.test_captured_steps import nothing_asked

from kvferry.kernels.coded_weights import CodedWeight, CodeKind, dequantized
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.gpu.weights import packed, products

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    # kind, outputs, inputs, group, form
    (CodeKind.INT4, 33, 512, 128, "middle"),
    (CodeKind.INT4, 17, 320, 64, "zeros"),
    (CodeKind.INT4, 16, 288, 32, "zeros"),
    (CodeKind.INT4, 5, 96, 32, "minima"),
    (CodeKind.INT4, 40, 300, 300, "channel"),
    (CodeKind.INT4, 24, 256, 64, "order"),
    (CodeKind.INT4, 7, 192, 96, "middle"),
    (CodeKind.INT8, 33, 224, 32, "middle"),
    (CodeKind.INT8, 20, 256, 128, "zeros"),
    (CodeKind.INT8, 31, 200, 200, "channel"),
    (CodeKind.FP8, 33, 384, 128, "middle"),
    (CodeKind.FP8, 9, 130, 130, "channel"),
]
ROWS = (1, 3, 16, 17, 128)


def moved(weight: CodedWeight, device: torch.device) -> CodedWeight:
    parts = {name: getattr(weight, name) for name in ("codes", "scales", "zeros", "minima", "order")}
    return replace(weight, **{name: part.to(device) for name, part in parts.items() if part is not None})


def linear_of(weight: CodedWeight, device: torch.device, bias: torch.Tensor | None = None) -> products.CodedLinear:
    found = products.pack_codes(moved(weight, device), bias)
    assert not isinstance(found, str), found
    return found


def expected(weight: CodedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = x.double() if weight.order is None else x.double()[:, weight.order]
    return F.linear(wide, dequantized(weight).double(), None if bias is None else bias.double())


def assert_close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    size = float(exact.abs().max())
    assert float((got.cpu().double() - exact).abs().max()) <= max(4 * torch.finfo(dtype).eps, 1e-5) * size


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-{c[1]}x{c[2]}-{c[3]}-{c[4]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_dequantized_weights(
    device: torch.device, case: tuple[CodeKind, int, int, int, str], dtype: torch.dtype
) -> None:
    weight = coded_weight(*case, seed=3)
    bias = torch.randn(case[1]).to(dtype) if case[1] % 2 else None
    run = linear_of(weight, device, None if bias is None else bias.to(device))
    for rows in ROWS if case[1] == 33 and dtype != torch.float32 else ROWS[1:4]:
        x = torch.randn(rows, case[2]).to(dtype)
        assert_close(run(x.to(device)), expected(weight, x, bias), dtype)


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(CodeKind),
    rows=st.sampled_from([0, 1, 2, 19]),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    group=st.sampled_from([32, 64, 128, 160]),
    seed=st.integers(0, 1 << 16),
)
def test_products_of_random_shapes(
    device: torch.device, kind: CodeKind, rows: int, outputs: int, groups: int, group: int, seed: int
) -> None:
    weight = coded_weight(kind, outputs, groups * group, group, seed=seed)
    x = torch.randn(rows, groups * group).half()
    got = linear_of(weight, device)(x.to(device))
    assert got.shape == (rows, outputs)
    if rows:
        assert_close(got, expected(weight, x, None), torch.float16)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[7], CASES[8], CASES[11]], ids=str)
def test_many_rows_are_multiplied_by_dequantized_weights(
    device: torch.device, case: tuple[CodeKind, int, int, int, str]
) -> None:
    weight, x = coded_weight(*case, seed=5), torch.randn(products.MOST_ROWS + 1, case[2])
    run = linear_of(weight, device)
    values = run.values_into(torch.empty(case[1], case[2], device=device), 0)
    assert torch.equal(values.cpu(), dequantized(weight)) or weight.minima is not None  # fused multiply-add
    whole = run(x.to(device))
    assert_close(whole, expected(weight, x, None), torch.float32)
    with mock.patch.object(products, "BUFFER_BYTES", 4 * 4 * case[2]):
        assert_close(run(x.to(device)), expected(weight, x, None), torch.float32)


@pytest.mark.parametrize("kind", CodeKind)
def test_a_row_does_not_depend_on_its_batch(device: torch.device, kind: CodeKind) -> None:
    run = linear_of(coded_weight(kind, 48, 512, 64), device)
    x = torch.randn(16, 512, device=device, dtype=torch.float16)
    whole = run(x)
    assert torch.equal(whole[5:6], run(x[5:6]))
    assert torch.equal(whole, run(x))
    many = torch.cat([x, x, x])
    assert torch.equal(run(many)[:17], run(many[:17]))


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    run = linear_of(coded_weight(CodeKind.INT4, 40, 256, 64, "order"), device)
    x = torch.randn(3, 256, device=device, dtype=torch.float16)
    with nothing_asked(device):
        run(x)


def test_memory_is_that_of_the_codes_and_their_scales() -> None:
    weight = packed.pack(coded_weight(CodeKind.INT4, 64, 512, 128, "zeros"))
    assert weight.num_bytes == 64 * 512 // 2 + 64 * 4 * (2 + 1)
    assert packed.pack(coded_weight(CodeKind.FP8, 64, 512, 512, "channel")).num_bytes == 64 * 512 + 64 * 4


def test_what_the_kernels_lack_has_a_reason() -> None:
    reason = products.pack_codes(coded_weight(CodeKind.INT4, 8, 96, 48), None)
    assert reason == "groups of 48 inputs are not a multiple of 32"


def test_wrong_inputs_are_refused(device: torch.device) -> None:
    run = linear_of(coded_weight(CodeKind.INT8, 8, 64, 32), device)
    with pytest.raises(BadKernelInput, match=r"x: the shape must be \(2, 64\)"):
        run(torch.zeros(2, 32, device=device))
