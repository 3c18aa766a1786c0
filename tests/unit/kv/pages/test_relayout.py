"""Planned copies against copies of single elements, for shapes without common divisors."""

import itertools
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.dtypes import CODED, DTYPES
from kvferry.core.errors import TicketRejected
from kvferry.kv.pages import fp8_codes
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import DtypeOverflow, plan

BASE = KvLayout("digest", "float32", num_layers=2, num_kv_heads=3, head_dim=4, block_tokens=16)
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8, "fp8": np.uint8}
LARGEST = {"int8": 127, "fp8": 448}


def bfloat16_bits(value: float) -> int:
    """Return the bits of the bfloat16 nearest to a float32, found by comparing both neighbours."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    down = bits & 0xFFFF0000
    low, high = (struct.unpack("<f", struct.pack("<I", b))[0] for b in (down, down + 0x10000))
    if abs(value - low) != abs(high - value):
        return (down if abs(value - low) < abs(high - value) else down + 0x10000) >> 16
    return next(b >> 16 for b in (down, down + 0x10000) if not (b >> 16) & 1)


Place = tuple[int, int, int, int]
"""Layer, K or V, head as in the model, token of its block."""


def places(layout: KvLayout, at: Place) -> tuple[slice, slice]:
    """Return the bytes of a page for a token's values of one head, and those of their scale, empty without one."""
    layer, kv, head, slot = at
    dim, tokens = layout.head_dim * STORED[layout.dtype]().itemsize, layout.block_tokens
    scale = 4 if layout.dtype in CODED else 0
    run = ((layer * layout.planes + kv) * layout.num_kv_heads + head - layout.first_kv_head) * tokens * (dim + scale)
    row, behind = run + slot * dim, run + tokens * dim + slot * scale
    return slice(row, row + dim), slice(behind, behind + scale)


def read(page: bytes, layout: KvLayout, at: Place) -> list[float]:
    values, scale = places(layout, at)
    raw = np.frombuffer(page[values], STORED[layout.dtype])
    if layout.dtype == "bfloat16":
        return [float(x) for x in (raw.astype(np.uint32) << 16).view(np.float32)]
    if layout.dtype == "fp8":
        raw = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn).float().numpy()
    if layout.dtype in CODED:
        return [float(np.float32(code) * np.frombuffer(page[scale], "<f4")[0]) for code in raw]
    return [float(x) for x in raw]


def write(page: bytearray, layout: KvLayout, at: Place, values: list[float]) -> None:
    place, scale = places(layout, at)
    if layout.dtype == "bfloat16":
        page[place] = np.array([bfloat16_bits(v) for v in values], np.uint16).tobytes()
    elif layout.dtype in CODED:
        most, largest = np.float32(max(map(abs, values))), np.float32(LARGEST[layout.dtype])
        inverse = largest / most if most > 1e-30 else np.float32(0)
        scaled = [float(np.float32(v) * inverse) for v in values]
        if layout.dtype == "int8":
            page[place] = bytes(round(v) & 0xFF for v in scaled)
        else:
            page[place] = torch.tensor(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
        page[scale] = (most / largest).tobytes()
    else:
        page[place] = np.array(values, STORED[layout.dtype]).tobytes()


def slowly(source: KvLayout, target: KvLayout, theirs: list[bytes], ours: list[bytearray], span: range) -> None:
    """Copy the positions of `span` one row at a time; the pages are those of the whole prompt."""
    for token in span:
        page, into = theirs[token // source.block_tokens], ours[token // target.block_tokens]
        for layer, kv, head in itertools.product(range(target.num_layers), range(target.planes), target.heads):
            given = (layer, kv, head, token % source.block_tokens)
            wanted = (layer, kv, head, token % target.block_tokens)
            if source.dtype == target.dtype:
                for of, to in zip(places(source, given), places(target, wanted), strict=True):
                    into[to] = page[of]
            else:
                write(into, target, wanted, read(page, source, given))


def some_pages(layout: KvLayout, count: int, seed: int) -> list[bytes]:
    """Return pages of random numbers within the range of float16."""
    rng = np.random.default_rng(seed)
    pages = [bytearray(layout.block_bytes) for _ in range(count)]
    every = itertools.product(range(layout.num_layers), range(layout.planes), layout.heads, range(layout.block_tokens))
    for at, page in itertools.product(every, pages):
        write(page, layout, at, rng.uniform(-9, 9, layout.head_dim).astype(np.float32).tolist())
    return [bytes(page) for page in pages]


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, int, int, int, int]:
    """Draw two layouts, the tokens of the prompt, the first target block, the number of blocks, and source pages per
    piece.
    """
    total = draw(st.integers(1, 4))
    start = draw(st.integers(0, total - 1))
    stop = draw(st.integers(start + 1, total))
    inner = draw(st.integers(start, stop - 1))
    source, target = (
        KvLayout(
            "digest",
            draw(st.sampled_from(DTYPES)),
            num_layers=layers,
            num_kv_heads=heads[1] - heads[0],
            head_dim=dim,
            block_tokens=draw(st.integers(1, 7)),
            first_kv_head=heads[0],
            total_kv_heads=total,
            planes=planes,
        )
        for layers, dim, planes in [(draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))]
        for heads in ((start, stop), (inner, draw(st.integers(inner + 1, stop))))
    )
    num_tokens = draw(st.integers(1, 20))
    blocks = -(-num_tokens // target.block_tokens)
    first = draw(st.integers(0, blocks - 1))
    return source, target, num_tokens, first, draw(st.integers(1, blocks - first)), draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 99))
def test_a_planned_copy_is_the_copy_of_each_element(
    case: tuple[KvLayout, KvLayout, int, int, int, int], seed: int
) -> None:
    source, target, num_tokens, first, count, step = case
    made = plan(source, target)
    theirs = some_pages(source, -(-num_tokens // source.block_tokens), seed)
    num_blocks = -(-num_tokens // target.block_tokens)
    expected = [bytearray(p) for p in some_pages(target, num_blocks, seed + 1)]
    pool = np.frombuffer(bytearray(b"".join(reversed(expected))), np.uint8).reshape(num_blocks, -1)
    local = [num_blocks - 1 - b for b in range(first, first + count)]  # the pool has the blocks in reverse order
    span = range(first * target.block_tokens, min((first + count) * target.block_tokens, num_tokens))
    slowly(source, target, theirs, expected, span)
    needed = made.source_blocks(first, count, num_tokens)
    assert [*needed] == sorted({t // source.block_tokens for t in span})
    for piece in made.pieces(needed, step * source.block_bytes):
        side_by_side = memoryview(b"".join(theirs[i] for i in piece))
        made.convert(side_by_side, piece, pool, local, first, num_tokens)
    assert [pool[num_blocks - 1 - b].tobytes() for b in range(num_blocks)] == expected


@given(st.integers(1, 60), st.integers(1, 40))
def test_equal_layouts_are_the_identity(num_tokens: int, block_tokens: int) -> None:
    layout = replace(BASE, block_tokens=block_tokens)
    made = plan(layout, layout)
    num_blocks = -(-num_tokens // block_tokens)
    assert made.source_blocks(0, num_blocks, num_tokens) == range(num_blocks)
    pages = some_pages(layout, num_blocks, 1)
    pool = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    full = num_blocks * block_tokens
    made.convert(memoryview(b"".join(pages)), range(num_blocks), pool, range(num_blocks), 0, full)
    assert pool.tobytes() == b"".join(pages)


@pytest.mark.parametrize(
    ("theirs", "ours", "first", "count", "num_tokens", "expected"),
    [
        (16, 32, 0, 2, 64, range(4)),
        (16, 32, 1, 1, 33, range(2, 3)),
        (32, 16, 1, 2, 48, range(2)),
        (32, 16, 3, 1, 49, range(1, 2)),
        (16, 24, 1, 1, 48, range(1, 3)),
        (24, 16, 1, 1, 17, range(1)),
        (16, 16, 2, 1, 20, range(0)),
    ],
)
def test_the_blocks_that_are_needed_follow_from_positions(
    theirs: int, ours: int, first: int, count: int, num_tokens: int, expected: range
) -> None:
    made = plan(replace(BASE, block_tokens=theirs), replace(BASE, block_tokens=ours))
    assert made.source_blocks(first, count, num_tokens) == expected


def test_pieces_stay_within_their_limit_of_bytes() -> None:
    made = plan(BASE, replace(BASE, block_tokens=24))
    size = BASE.block_bytes
    assert made.pieces(range(3, 8), 2 * size + 1) == [range(3, 5), range(5, 7), range(7, 8)]
    with pytest.raises(ValueError, match=str(size)):
        made.pieces(range(3), size - 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_digest": "other"}, "model_digest"),
        ({"num_layers": 3}, "num_layers"),
        ({"head_dim": 8}, "head_dim"),
        ({"planes": 1}, "planes"),
        ({"dtype": "int4"}, "dtype"),
        ({"num_kv_heads": 6}, "total_kv_heads"),
        ({"num_kv_heads": 2, "total_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 2, "total_kv_heads": 3, "first_kv_head": 1}, "num_kv_heads"),
    ],
)
def test_layouts_that_cannot_be_converted_are_refused_by_field(changes: dict[str, object], field: str) -> None:
    source = replace(BASE, **changes)  # type: ignore[arg-type]
    with pytest.raises(TicketRejected) as caught:
        plan(source, BASE)
    assert (caught.value.reason, caught.value.field) == ("TICKET_LAYOUT", field)
    assert f"differ in {field}: " in caught.value.message
    with pytest.raises(TicketRejected):
        plan(BASE, replace(source, head_dim=5))


def converted(values: list[float], source: str, target: str) -> list[float]:
    """Convert the values of one token through a page of each type."""
    layouts = [KvLayout("d", t, 1, 1, len(values), 1) for t in (source, target)]
    page, pool = bytearray(layouts[0].block_bytes), np.zeros((1, layouts[1].block_bytes), np.uint8)
    for kv in (0, 1):
        write(page, layouts[0], (0, kv, 0, 0), values)
    plan(*layouts).convert(memoryview(page), range(1), pool, [0], 0, 1)
    return read(pool.tobytes(), layouts[1], FIRST)


FIRST: Place = (0, 0, 0, 0)


def test_narrowing_to_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    ulp = 2.0**-7
    got = converted([1 + ulp / 2, 1 + ulp * 3 / 2, 1 + ulp * 0.51, -1 - ulp / 2, 0.0, 1e-40], "float32", "bfloat16")
    assert got == [1.0, 1 + 2 * ulp, 1 + ulp, -1.0, 0.0, *read(struct.pack("<H", bfloat16_bits(1e-40)), BF16, FIRST)]


BF16 = KvLayout("d", "bfloat16", 1, 1, 1, 1)


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126),
        min_size=1,
        max_size=9,
    )
)
def test_every_float_rounds_to_its_nearest_bfloat16(values: list[float]) -> None:
    got = converted(values, "float32", "bfloat16")
    assert got == [x for v in values for x in read(struct.pack("<H", bfloat16_bits(v)), BF16, FIRST)]
    assert converted(got, "bfloat16", "float32") == got, "widening to float32 is exact"


def test_nan_stays_nan_and_infinity_stays() -> None:
    layout = replace(BF16, dtype="float32", head_dim=3)
    page = struct.pack("<IIf", 0x7F800001, 0xFFFFFFFF, float("inf")) * 2
    pool = np.zeros((1, 12), np.uint8)
    plan(layout, replace(BF16, head_dim=3)).convert(memoryview(page), range(1), pool, [0], 0, 1)
    assert struct.unpack("<3H", pool.tobytes()[:6]) == (0x7FC0, 0xFFFF, 0x7F80)


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_a_value_that_float16_cannot_hold_ends_the_copy(source: str) -> None:
    assert converted([65504.0 if source == "float32" else 65280.0, 1e-30], source, "float16")[1] == 0.0
    with pytest.raises(DtypeOverflow, match="float16"):
        converted([1.0, 1e6], source, "float16")


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9))
def test_numbers_of_fp8_are_within_a_sixteenth_or_half_a_small_step_and_are_preserved(values: list[float]) -> None:
    got = converted(values, "float32", "fp8")
    step = max(map(abs, values)) / 448 * 2**-9
    assert all(abs(a - b) <= abs(b) / 16 + 0.5001 * step + 1e-30 for a, b in zip(got, values, strict=True))
    again = converted(got, "float32", "fp8")
    assert all(abs(a - b) <= 1e-6 * abs(a) + 1e-30 for a, b in zip(got, again, strict=True))


@given(st.lists(st.floats(-448, 448, width=32), min_size=1))
def test_codes_of_fp8_are_those_of_torch(values: list[float]) -> None:
    given = np.array(values, np.float32)
    expected = torch.from_numpy(given).to(torch.float8_e4m3fn)
    assert np.array_equal(fp8_codes.encode(given), expected.view(torch.uint8).numpy())
    assert np.array_equal(fp8_codes.decode(fp8_codes.encode(given)), expected.float().numpy())


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9))
def test_codes_are_within_half_a_step_and_are_preserved(values: list[float]) -> None:
    got = converted(values, "float32", "int8")
    step = max(map(abs, values)) / 127
    assert all(abs(a - b) <= 0.5001 * step + 1e-30 for a, b in zip(got, values, strict=True))
    again = converted(got, "float32", "int8")
    assert all(abs(a - b) <= 1e-6 * 127 * step + 1e-30 for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_codes_of_nan_and_infinity_are_nan(bad: float, dtype: str) -> None:
    layout = replace(BF16, dtype="float32", head_dim=2)
    page = struct.pack("<4f", 1.0, bad, 3.0, 4.0)
    pool = np.zeros((1, 12), np.uint8)
    plan(layout, replace(layout, dtype=dtype)).convert(memoryview(page), range(1), pool, [0], 0, 1)
    keys, values = (read(pool.tobytes(), replace(layout, dtype=dtype), (0, kv, 0, 0)) for kv in (0, 1))
    assert all(math.isnan(x) for x in keys)
    assert values == pytest.approx([3.0, 4.0], abs=4 / 254 if dtype == "int8" else 3.0 / 16)
