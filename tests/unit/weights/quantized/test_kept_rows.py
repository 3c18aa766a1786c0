"""Kept rows of quantized matrices: the kernels' decoder gives the values, for random codes, scales and groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import compiled
from kvferry.weights.quantized.float8_matrix import E4M3, Float8Matrix
from kvferry.weights.quantized.integer_matrix import Grouping, IntegerMatrix
from kvferry.weights.quantized.representation import Kept, report

POOL = compiled.make_pool(1)


def decoded(matrix: IntegerMatrix | Float8Matrix, form: str = "shipped") -> np.ndarray:
    """Return the values of the packed matrix, computed as its product with unit vectors."""
    stored, (rows, cols) = matrix.stored(), matrix.shape
    packed = compiled.make_matrix(form, [stored.type_id], rows, cols)
    out = np.empty(packed.num_bytes, np.uint8)
    packed.pack([stored.type_id], [stored.data], stored.order, out)
    packed.attach(out)
    result = np.empty((cols, rows), np.float32)
    module = compiled.extension()
    assert module is not None
    module.product(POOL, "portable", packed, np.eye(cols, dtype=np.float32), result, 32)
    return result.T


@st.composite
def matrices(draw: st.DrawFn) -> IntegerMatrix:
    bits = draw(st.sampled_from([4, 8]))
    group, groups = draw(st.sampled_from([16, 32, 64, 48])), draw(st.integers(1, 4))
    rows, cols = draw(st.integers(1, 20)), group * groups
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scales = rng.standard_normal((rows, groups)).astype(np.float16 if draw(st.booleans()) else np.float32)
    codes = rng.integers(0, 1 << bits, (rows, cols)).astype(np.uint8)
    zeros = rng.integers(0, 1 << bits, (rows, groups)).astype(np.uint8)
    of_input = rng.integers(0, groups, cols) if draw(st.booleans()) else None
    return IntegerMatrix(
        (rows, cols),
        bits,
        Grouping(group, of_input),
        "random",
        lambda: codes,
        lambda: scales.astype(np.float32),
        (lambda: zeros) if draw(st.booleans()) else None,
    )


@given(matrices())
@settings(max_examples=120, deadline=None)
def test_kept_codes_are_exact_and_kept_floats_rounded_once(matrix: IntegerMatrix) -> None:
    values, kept = matrix.values(), matrix.choice.kept
    exact = decoded(matrix, "f32")
    np.testing.assert_allclose(exact, values, rtol=1e-6, atol=2e-6 * np.abs(values).max(initial=1e-30))
    rounding = {Kept.FLOAT16: 2.0**-11, Kept.BFLOAT16: 2.0**-8}.get(kept, 3e-6)
    np.testing.assert_allclose(
        decoded(matrix), values, rtol=rounding, atol=rounding * np.abs(values).max(initial=1e-30)
    )


def integers(scales: np.ndarray, *, bits: int = 4, zeros: int | None = None, group: int = 32) -> IntegerMatrix:
    groups = scales.shape[1]
    codes = np.full((len(scales), groups * group), 3, np.uint8)
    points = None if zeros is None else np.full(scales.shape, zeros, np.uint8)
    load = None if points is None else lambda: points
    return IntegerMatrix((len(scales), groups * group), bits, Grouping(group), "s", lambda: codes, lambda: scales, load)


@pytest.mark.parametrize(
    ("scales", "more", "kept", "reasons"),
    [
        ([[0.5]], {}, Kept.CODES4, []),
        ([[0.5]], {"zeros": 8}, Kept.CODES4, []),
        ([[0.1]], {}, Kept.CODES4_WIDE, ["scales are not float16"]),
        ([[0.5]], {"zeros": 7}, Kept.CODES4_WIDE, ["zero points differ from 8"]),
        ([[0.5]], {"bits": 8}, Kept.CODES8, ["values have 8 bits"] * 2),
        ([[0.1]], {"bits": 8}, Kept.CODES8_WIDE, ["values have 8 bits"] * 2 + ["scales are not float16"]),
        (
            [[0.5]],
            {"bits": 8, "zeros": 3},
            Kept.FLOAT16,
            ["values have 8 bits"] * 2 + ["zero points differ from 128"] * 2,
        ),
        ([[0.5]], {"group": 48}, Kept.FLOAT16, ["48 inputs are not a multiple of 32"] * 4),
        ([[0.5, 0.5]], {"group": 16}, Kept.FLOAT16, ["groups of 16 inputs are not a multiple of 32"] * 4),
        ([[1e-6, 0.5]], {"group": 16}, Kept.BFLOAT16, None),
        ([[1e5, 0.5]], {"group": 16}, Kept.BFLOAT16, None),
    ],
)
def test_each_candidate_that_is_passed_over_has_its_reason(
    scales: list[list[float]], more: dict[str, int], kept: Kept, reasons: list[str] | None
) -> None:
    choice = integers(np.array(scales, np.float32), **more).choice
    assert choice.kept is kept
    if reasons is not None:
        assert [reason for _, reason in choice.passed_over] == reasons


def test_a_scale_that_is_no_number_is_refused_when_packed() -> None:
    for poison in (np.nan, np.inf):
        for more in ({}, {"group": 16}, {"zeros": 3}):
            matrix = integers(np.array([[poison, 1.0]], np.float32), **more)
            with pytest.raises(ArithmeticError, match="not finite"):
                decoded(matrix)


def test_the_values_of_e4m3_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, expected)


def test_blocks_that_are_cut_off_have_their_own_scales() -> None:
    scales = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    matrix = Float8Matrix((5, 8), "s", lambda: np.full((5, 8), 0x38, np.uint8), lambda: scales, (3, 3))
    expected = np.repeat(np.repeat(scales, 3, 0), 3, 1)[:5, :8]
    np.testing.assert_array_equal(matrix.values(), expected)
    np.testing.assert_array_equal(matrix.rows(2, 3).values(), expected[2:5])
    np.testing.assert_array_equal(decoded(matrix), expected)


def test_a_report_has_a_line_for_each_choice() -> None:
    half, wide = (integers(np.array([[s]], np.float32)).choice for s in (0.5, 0.1))
    lines = report({"a": half, "b": half, "c": wide})
    assert [line.split(":")[0] for line in lines] == ["a and 1 more", "c"]
    assert "not 4-bit values with a float16 scale per 32 inputs: scales are not float16" in lines[1]
