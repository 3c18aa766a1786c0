"""Packed matrices times rows: every form of weights, every instruction level, any size, against arithmetic in
float64.
"""

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvferry.kernels import compiled

extension = compiled.extension()
assert extension is not None, "the compiled kernels were not built; the tests need a C++ compiler"
POOL = compiled.make_pool(3)
LEVELS = compiled.levels()
ROUNDING = LEVELS[2:]
"""Levels that round inputs to bfloat16 for weights of 16 bits and for codes."""
FORMS = [("f32", "F32"), ("bf16", "F32"), ("f16", "F32"), ("shipped", "F32"), ("shipped", "F16"), ("shipped", "BF16")]
CODED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
FORMS += [("shipped", name) for name in CODED] + [("bf16", "Q4_1"), ("f32", "Q6_K")]
SCALE_PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
PLAIN = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,)}
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 31, 32, 33, 64, 97, 130)

Floats = npt.NDArray[np.float32]


def to_bf16(x: npt.NDArray[np.floating]) -> Floats:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def random_rows(name: str, rows: int, cols: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random blocks with scales of moderate size; all other bits are arbitrary."""
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        if name == "F32":
            return values.view(np.uint8)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    width, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (rows, cols // width, size), dtype=np.uint8)
    for place in (SCALE_PLACES | PLAIN)[name]:
        scales = (rng.standard_normal((rows, cols // width, 1)) * 0.02).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8).reshape(rows, cols // width, 2)
    return blocks.reshape(rows, -1)


def pack(form: str, name: str, raw: npt.NDArray[np.uint8], cols: int, order: list[int] | None = None) -> object:
    rows = np.arange(len(raw)) if order is None else np.array(order, dtype=np.int64)
    kind = int(GGMLQuantizationType[name])
    matrix = compiled.make_matrix(form, [kind], len(rows), cols)
    out = np.full(matrix.num_bytes, 0xAA, np.uint8)
    matrix.pack([kind], [np.ascontiguousarray(raw).reshape(-1)], rows, out)
    matrix.attach(out)
    return matrix


def values_of(form: str, name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    if name == "F32":
        values = raw.view(np.float32)
    elif name == "F16":
        values = raw.view(np.float16).astype(np.float32)
    elif name == "BF16":
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = dequantize(raw, GGMLQuantizationType[name]).astype(np.float32)
    if form == "bf16":
        values = to_bf16(values)
    return (values.astype(np.float16) if form == "f16" else values).astype(np.float64)


def run(level: str, matrix: object, x: Floats, *, bits: int = 16) -> Floats:
    out = np.full((len(x), matrix.rows), np.nan, np.float32)  # type: ignore[attr-defined]
    extension.product(POOL, level, matrix, x, out, bits)
    return out


def to_whole(x: Floats, most: int) -> npt.NDArray[np.float64]:
    """Return the inputs with each group of 32 rounded to `most` steps between zero and its largest magnitude."""
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.where(top > 1e-30, np.float32(most) / np.maximum(top, np.float32(1e-30)), np.float32(0))
    whole = np.rint(groups * inverse.astype(np.float32))
    return (whole.astype(np.float64) * (top / np.float32(most))).reshape(x.shape)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("form", "name"), FORMS, ids=[f"{f}-{n}" for f, n in FORMS])
@pytest.mark.parametrize("bits", [16, 32])
def test_a_product_is_right_and_the_same_in_any_batch(bits: int, form: str, name: str, level: str) -> None:
    rng = np.random.default_rng(7)
    for rows, cols in ((93, 512), (16, 256), (5, 768)):
        raw = random_rows(name, rows, cols, rng)
        matrix = pack(form, name, raw, cols)
        x = rng.standard_normal((max(ROWS), cols), dtype=np.float32)
        rounds = level in ROUNDING and matrix.format not in ("f32", "f16")  # type: ignore[attr-defined]
        seen = (to_bf16(x) if rounds else x).astype(np.float64)
        weights = values_of(form, name, raw)
        # A float32 sum of n terms errs by at most n half units of the sum of magnitudes; codes add the minimum's term.
        bound = (cols + 64) * 2.0**-24 * (np.abs(seen) @ (np.abs(weights).T + np.abs(weights).max())) + 1e-30
        whole = run(level, matrix, x, bits=bits)
        assert (np.abs(whole - seen @ weights.T) <= bound).all()
        for count in ROWS:
            first = int(rng.integers(0, max(ROWS) - count + 1))
            assert np.array_equal(run(level, matrix, x[first : first + count], bits=bits), whole[first : first + count])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("bits", [8, 16])
def test_codes_times_whole_numbers_are_right_and_the_same_in_any_batch(name: str, level: str, bits: int) -> None:
    if bits == 16 and level in ROUNDING:
        pytest.skip("this level multiplies bfloat16 pairs, not 16-bit integers")
    rng = np.random.default_rng(7)
    for rows, cols in ((93, 512), (16, 256), (5, 768)):
        raw = random_rows(name, rows, cols, rng)
        matrix = pack("shipped", name, raw, cols)
        x = rng.standard_normal((max(ROWS), cols), dtype=np.float32)
        x[0] = 0
        x[1, :32] = 1e-35
        x[2] *= np.float32(1e20)
        seen, weights = to_whole(x, 127 if bits == 8 else 32767), values_of("shipped", name, raw)
        # Sums of codes are exact; one product and two additions per block are rounded.
        bound = (cols / 16 + 64) * 2.0**-24 * (np.abs(seen) @ (np.abs(weights).T + np.abs(weights).max())) + 1e-30
        whole = run(level, matrix, x, bits=bits)
        assert (np.abs(whole - seen @ weights.T) <= bound).all()
        for count in ROWS:
            first = int(rng.integers(0, max(ROWS) - count + 1))
            alone = run(level, matrix, x[first : first + count], bits=bits)
            assert np.array_equal(alone, whole[first : first + count])


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_with_one_scale_are_right_and_the_same_in_any_batch(level: str) -> None:
    """All blocks of an output share a scale, as in int8 checkpoints; in the second matrix, the last output has two
    scales.
    """
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (37, 9, 34), dtype=np.uint8)
    blocks[..., :2] = rng.uniform(0.01, 0.1, (37, 1, 1)).astype(np.float16).view(np.uint8)
    several = blocks.copy()
    several[-1, 4, :2] = np.array([0.5], np.float16).view(np.uint8)
    x = rng.standard_normal((max(ROWS), 288), dtype=np.float32)
    for raw in (blocks.reshape(37, -1), several.reshape(37, -1)):
        matrix = pack("shipped", "Q8_0", raw, 288)
        whole, weights = run(level, matrix, x, bits=8), values_of("shipped", "Q8_0", raw)
        np.testing.assert_allclose(whole, to_whole(x, 127) @ weights.T, rtol=1e-4, atol=1e-3)
        for count in ROWS:
            assert np.array_equal(run(level, matrix, x[:count], bits=8), whole[:count])


@pytest.mark.skipif(len(LEVELS) < 3, reason="this machine runs one level with fused products at most")
@pytest.mark.parametrize("name", CODED)
def test_levels_with_fused_products_make_the_same_bits_of_bytes(name: str) -> None:
    rng = np.random.default_rng(9)
    matrix = pack("shipped", name, random_rows(name, 93, 512, rng), 512)
    x = rng.standard_normal((130, 512), dtype=np.float32)
    for level in LEVELS[2:]:
        assert np.array_equal(run("avx2", matrix, x, bits=8), run(level, matrix, x, bits=8))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_inputs_that_are_not_finite_are_not_rounded_to_numbers(poison: float, level: str, bits: int) -> None:
    rng = np.random.default_rng(5)
    for name in ("Q4_1", "Q8_0"):
        matrix = pack("shipped", name, random_rows(name, 32, 64, rng), 64)
        x = rng.standard_normal((7, 64), dtype=np.float32)
        x[3, 40] = poison
        got = run(level, matrix, x, bits=bits)
        assert not np.isfinite(got[3]).any()
        assert np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_extreme_codes_and_inputs_do_not_overflow(level: str, bits: int) -> None:
    """All codes and all inputs have their largest magnitude, with either sign."""
    for code in (-128, 127):
        blocks = np.zeros((16, 2, 34), np.uint8)
        blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        blocks[..., 2:] = np.array([code], np.int8).view(np.uint8)
        matrix = pack("shipped", "Q8_0", blocks.reshape(16, -1), 64)
        for x in (np.full((9, 64), 1.0, np.float32), np.full((9, 64), -1.0, np.float32)):
            np.testing.assert_allclose(run(level, matrix, x, bits=bits), 64 * code * x[0, 0], rtol=1e-6)
    fours = np.full((16, 2, 20), 0xFF, np.uint8)
    fours[..., :4] = np.array([1.0, 0.0], np.float16).view(np.uint8)
    matrix = pack("shipped", "Q4_1", fours.reshape(16, -1), 64)
    np.testing.assert_allclose(run(level, matrix, np.ones((9, 64), np.float32), bits=bits), 15 * 64, rtol=1e-6)


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in ROUNDING])
def test_small_inputs_beside_a_large_one_are_kept_in_32_bits(level: str) -> None:
    """The weight of the large input is zero, so the result is the sum of the small inputs."""
    blocks = np.zeros((16, 1, 34), np.uint8)
    blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    blocks[..., 3:] = 1
    matrix = pack("shipped", "Q8_0", blocks.reshape(16, -1), 32)
    x = np.full((7, 32), 0.01, np.float32)
    x[:, 0] = 1e4
    np.testing.assert_allclose(run(level, matrix, x, bits=32), 0.31, rtol=1e-3)
    assert np.abs(run(level, matrix, x, bits=16) - 0.31).min() > 0.1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 48, 112])
@pytest.mark.parametrize("form", ["f32", "f16", "bf16"])
def test_inputs_of_any_length(form: str, cols: int, level: str) -> None:
    rng = np.random.default_rng(cols)
    raw = random_rows("F32", 21, cols, rng)
    x = rng.standard_normal((9, cols), dtype=np.float32)
    rounds = level in ROUNDING and form == "bf16"
    seen = (to_bf16(x) if rounds else x).astype(np.float64)
    expected = seen @ values_of(form, "F32", raw).T
    np.testing.assert_allclose(run(level, pack(form, "F32", raw, cols), x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CODED)
def test_rows_are_dequantized_to_the_bits_of_the_library(name: str) -> None:
    raw = random_rows(name, 24, 512, np.random.default_rng(13))
    got = run("portable", pack("f32", name, raw, 512), np.eye(512, dtype=np.float32)).T
    np.testing.assert_array_equal(got, values_of("f32", name, raw).astype(np.float32))


def test_rows_are_packed_in_the_given_order() -> None:
    rng = np.random.default_rng(3)
    raw = random_rows("Q4_1", 20, 64, rng)
    order = [19, -1, 0, 7, 7, -1, 3]
    weights = values_of("shipped", "Q4_1", raw)
    expected = np.array([weights[i] if i >= 0 else np.zeros(64) for i in order])
    got = run("portable", pack("shipped", "Q4_1", raw, 64, order), np.eye(64, dtype=np.float32)).T
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (("Q4_1", "Q8_0"), "codes8"),
        (("Q4_K", "Q6_K"), "codes6"),
        (("Q6_K", "Q5_0"), "codes8"),
        (("Q4_0", "Q5_1"), "codes8"),
        (("Q4_0", "IQ4_NL"), "codes8"),
        (("Q4_0", "Q4_1"), "codes4"),
        (("Q4_0", "Q4_K"), "codes4"),
        (("F16", "Q8_0"), "f32"),
        (("F16", "BF16"), "f32"),
    ],
)
def test_tensors_of_different_kinds_share_a_matrix(names: tuple[str, str], form: str) -> None:
    rng = np.random.default_rng(11)
    parts = [random_rows(name, 10, 256, rng) for name in names]
    kinds = [int(GGMLQuantizationType[name]) for name in names]
    matrix = compiled.make_matrix("shipped", kinds, 20, 256)
    assert matrix.format == form
    out = np.empty(matrix.num_bytes, np.uint8)
    matrix.pack(kinds, [np.ascontiguousarray(p).reshape(-1) for p in parts], np.arange(20), out)
    matrix.attach(out)
    expected = np.concatenate([values_of("shipped", n, p) for n, p in zip(names, parts, strict=True)])
    got = run("portable", matrix, np.eye(256, dtype=np.float32)).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("form", "name"), [("shipped", "Q4_1"), ("shipped", "Q6_K"), ("f32", "F32"), ("bf16", "Q8_0")])
def test_weights_that_are_no_numbers_are_refused(form: str, name: str) -> None:
    raw = random_rows(name, 16, 256, np.random.default_rng(1)).copy()
    if name == "F32":
        raw.view(np.float32)[3, 5] = np.inf
    else:
        place = (SCALE_PLACES | PLAIN)[name][0]
        raw[3, place : place + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ArithmeticError, match="not finite"):
        pack(form, name, raw, 256)


def test_arrays_that_would_be_copied_first_are_refused() -> None:
    matrix = compiled.make_matrix("f32", [0], 16, 32)
    out = np.zeros(matrix.num_bytes, np.uint8)
    with pytest.raises(TypeError, match="a bias must be a contiguous numpy array"):
        matrix.attach(out, np.zeros(16, np.float64))
    matrix.attach(out)
    with pytest.raises(ValueError, match="already has its data"):
        matrix.attach(out)
    with pytest.raises(TypeError):
        extension.product(POOL, "portable", matrix, np.zeros((1, 32), np.float32), np.zeros((1, 16), np.float64))


def test_a_phase_of_too_many_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="too many chunks"):
        extension.sum_products(POOL, "portable", 1 << 20)


def test_a_weight_too_large_for_its_form_is_refused() -> None:
    raw = np.full((16, 32), 1e6, np.float32)
    with pytest.raises(ArithmeticError, match="not finite"):
        pack("f16", "F32", raw.view(np.uint8), 32)


def test_arguments_that_do_not_fit_are_refused_before_memory_is_written() -> None:
    with pytest.raises(ValueError, match="must be a multiple of the type's block"):
        compiled.make_matrix("shipped", [3], 16, 48)
    with pytest.raises(ValueError, match="unknown packed format int3"):
        compiled.make_matrix("int3", [0], 16, 48)
    matrix = compiled.make_matrix("f32", [0], 16, 32)
    raw = np.zeros(16 * 32 * 4, np.uint8)
    out = np.empty(matrix.num_bytes, np.uint8)
    with pytest.raises(ValueError, match="the wrong size"):
        matrix.pack([0], [raw], np.arange(16), out[:-1])
    with pytest.raises(ValueError, match="a row that does not exist"):
        matrix.pack([0], [raw], np.full(16, 16), out)
    with pytest.raises(ValueError, match="has no data"):
        extension.product(POOL, "portable", matrix, np.zeros((1, 32), np.float32), np.zeros((1, 16), np.float32))
    matrix.pack([0], [raw], np.arange(16), out)
    matrix.attach(out)
    with pytest.raises(ValueError, match="the wrong width"):
        extension.product(POOL, "portable", matrix, np.zeros((1, 31), np.float32), np.zeros((1, 16), np.float32))
    with pytest.raises(ValueError, match="does not support level sse9"):
        extension.product(POOL, "sse9", matrix, np.zeros((1, 32), np.float32), np.zeros((1, 16), np.float32))
