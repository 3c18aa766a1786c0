"""Indices into a table of 16 values: at every level, products are those of the same values in 8 bits, bit for bit."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import IQ4_NL
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import compiled
from kvferry.weights.quantized.mxfp4 import TWICE

extension = compiled.extension()
assert extension is not None, "the compiled kernels were not built; the tests need a C++ compiler"
POOL = compiled.make_pool(2)
LEVELS = compiled.levels()
Q8_0, WIDE8, IQ4, E2M1, WIDE_E2M1 = 8, 1001, 20, 1004, 1005
TABLES = {
    IQ4: (np.array(IQ4_NL.kvalues, np.int8), Q8_0, np.float16),
    E2M1: (TWICE, Q8_0, np.float16),
    WIDE_E2M1: (TWICE, WIDE8, np.float32),
}
"""Row type: the table, the row type of the same values in 8 bits, and the type of scales."""
Bytes = npt.NDArray[np.uint8]


def packed(kinds: list[int], parts: list[Bytes], cols: int) -> object:
    counts = [len(part) for part in parts]
    matrix = compiled.make_matrix("shipped", kinds, sum(counts), cols)
    out = np.full(matrix.num_bytes, 0xAA, np.uint8)
    matrix.pack(kinds, [np.ascontiguousarray(part).reshape(-1) for part in parts], np.arange(sum(counts)), out)
    matrix.attach(out)
    return matrix


def rows_of(kind: int, codes: Bytes, scales: npt.NDArray[np.floating]) -> tuple[Bytes, Bytes]:
    """Return rows of indices, and rows of the 8-bit values, from codes [rows, blocks, 32] and scales [rows, blocks]."""
    table, _, scale_type = TABLES[kind]
    prefix = np.ascontiguousarray(scales.astype(scale_type)[..., None]).view(np.uint8)
    nibbles = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return np.concatenate((prefix, nibbles), -1), np.concatenate((prefix, table[codes].view(np.uint8)), -1)


def product(level: str, matrix: object, x: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    out = np.full((len(x), matrix.rows), np.nan, np.float32)
    extension.product(POOL, level, matrix, x, out, bits)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TABLES)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    blocks=st.integers(2, 9),
    inputs=st.sampled_from([1, 2, 3, 5, 7, 16, 24, 25, 33]),
    bits=st.sampled_from([8, 16, 32]),
)
@settings(max_examples=25, deadline=None)
def test_products_are_those_of_8_bit_values(
    level: str, kind: int, seed: int, rows: int, blocks: int, inputs: int, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, blocks, 32), dtype=np.uint8)
    scales = rng.standard_normal((rows, blocks))
    narrow, wide = rows_of(kind, codes, scales)
    cols = 32 * blocks
    small = packed([kind], [narrow.reshape(rows, -1)], cols)
    large = packed([TABLES[kind][1]], [wide.reshape(rows, -1)], cols)
    assert (small.format, large.format) == ("codes4-table", "codes8")
    assert large.num_bytes - small.num_bytes == small.padded_rows * cols // 2
    x = (rng.standard_normal((inputs, cols)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    np.testing.assert_array_equal(product(level, small, x, bits), product(level, large, x, bits))
    chosen = rng.integers(0, rows, 3)
    found = [np.empty((3, cols), np.float32) for _ in range(2)]
    for matrix, values in zip((small, large), found, strict=True):
        extension.dequantize(level, matrix, chosen, values)
    np.testing.assert_array_equal(*found)
    exact = TABLES[kind][0][codes] * scales.astype(TABLES[kind][2]).astype(np.float32)[..., None]
    np.testing.assert_array_equal(found[0], exact.reshape(rows, -1)[chosen])


@pytest.mark.parametrize(
    ("kinds", "form"),
    [((E2M1, WIDE_E2M1), "codes4-table"), ((E2M1, IQ4), "codes8"), ((WIDE_E2M1, Q8_0), "codes8")],
)
def test_tensors_that_share_a_matrix_keep_indices_into_the_same_table_only(kinds: tuple[int, int], form: str) -> None:
    rng = np.random.default_rng(4)
    parts, values = [], []
    for kind in kinds:
        codes, scales = rng.integers(0, 16, (9, 3, 32), dtype=np.uint8), rng.standard_normal((9, 3))
        of_table = kind if kind in TABLES else E2M1
        narrow, wide = rows_of(of_table, codes, scales)
        parts.append((wide if kind == Q8_0 else narrow).reshape(9, -1))
        table, _, scale_type = TABLES[of_table]
        values.append((table[codes] * scales.astype(scale_type).astype(np.float32)[..., None]).reshape(9, -1))
    matrix = packed(list(kinds), parts, 96)
    assert matrix.format == form
    found = np.empty((18, 96), np.float32)
    extension.dequantize(LEVELS[0], matrix, np.arange(18), found)
    np.testing.assert_array_equal(found, np.concatenate(values))
