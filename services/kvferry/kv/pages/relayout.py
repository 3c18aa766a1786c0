"""Layout conversion of KV pages (block size, dtype, range of KV heads), planned once per pair of layouts.

    source, blocks of 16  |  0 .. 15 | 16 .. 31 | 32 .. 47 | 48 ..      tokens of a prompt, by position
    target, blocks of 24  |   0 .. 23    |   24 .. 47    | 48 ..

A move covers the overlap of one source block with one target block (all layers, K and V, the target's heads and a run
of tokens) in one strided copy that also converts the dtype. Block size, dtype and the range of KV heads may differ; any
other difference means different values and is rejected with the name of the field.

Widening is exact. Narrowing rounds to nearest, ties to even; int8 and fp8 use one scale per token and head. float16
has a smaller range than float32 and bfloat16; a value outside this range aborts the conversion, since recomputing is
better than KV with infinities.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.dtypes import CODED, FP8
from kvferry.core.errors import TicketRejected
from kvferry.kv.pages import fp8_codes
from kvferry.kv.pages.layout import KvLayout

_STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
}
"""Numpy dtype by KV data type; bfloat16 and fp8 are represented by their bit patterns."""
_SCALE = np.dtype("<f4")
_MAX_INT8 = np.float32(127)
_MIN_WITH_INVERSE = np.float32(1e-30)
"""Threshold for quantization: a row whose largest absolute value is not above it is quantized to zero."""
_CONVERT_ELEMENTS = 1 << 16
"""Elements converted at a time, so that intermediate values stay in a core's cache."""

Pages = npt.NDArray[np.uint8]
"""Page memory as an array [pages, block_bytes]."""


class DtypeOverflow(ArithmeticError):
    """A value is outside the range of the target's dtype."""


@dataclass(frozen=True, slots=True)
class Relayout:
    """Conversion plan for a pair of layouts; created by `plan`."""

    source: KvLayout
    target: KvLayout

    def source_blocks(self, first: int, count: int, num_tokens: int) -> range:
        """Return the source blocks that hold the tokens of target blocks first .. first+count-1, for a prompt of
        `num_tokens` tokens.

        Args:
            first: index of the first target block.
            count: number of target blocks.
            num_tokens: number of tokens of the prompt.
        """
        size, theirs = self.target.block_tokens, self.source.block_tokens
        start, stop = first * size, min((first + count) * size, num_tokens)
        return range(start // theirs, -(-stop // theirs)) if start < stop else range(0)

    def pieces(self, blocks: range, max_bytes: int) -> list[range]:
        """Split the source's `blocks` into runs of at most `max_bytes` each.

        Raises:
            ValueError: `max_bytes` is less than one page.
        """
        step = max_bytes // self.source.block_bytes
        if not step:
            raise ValueError(
                f"a page of the peer has {self.source.block_bytes} bytes, but the staging slot has only {max_bytes} "
                "bytes"
            )
        return [blocks[i : i + step] for i in range(0, len(blocks), step)]

    def convert(
        self,
        pages: memoryview,
        blocks: range,
        targets: Pages,
        local: Sequence[int],
        first: int,
        num_tokens: int,
    ) -> None:
        """Convert and copy only the tokens that source pages share with target blocks first .. first+len(local)-1.

        Args:
            pages: contiguous source pages of `blocks`.
            blocks: positions of the source blocks in the prompt.
            targets: [num_blocks, block_bytes], all pages of this worker.
            local: page id of each target block.
            first: position in the prompt of the target block in `local[0]`.
            num_tokens: length of the prompt; slots after its end are not copied.

        Raises:
            DtypeOverflow: a value is outside the range of the target's dtype.
        """
        given = self._view(np.frombuffer(pages, np.uint8, len(blocks) * self.source.block_bytes), self.source)
        wanted = self._view(targets, self.target)
        begin = self.target.first_kv_head - self.source.first_kv_head
        heads = slice(begin, begin + self.target.num_kv_heads)
        for i, theirs, j, ours in self._moves(blocks, first, len(local), num_tokens):
            self._move(given.at(i, heads, theirs), wanted.at(local[j], slice(None), ours))

    def _moves(self, blocks: range, first: int, count: int, num_tokens: int) -> Iterator[tuple[int, slice, int, slice]]:
        """Yield (source page, source slots, target block, target slots) of each overlap, in order of position."""
        theirs, ours = self.source.block_tokens, self.target.block_tokens
        start = max(blocks.start * theirs, first * ours)
        end = min(blocks.stop * theirs, (first + count) * ours, num_tokens)
        while start < end:
            i, j = start // theirs, start // ours
            stop = min((i + 1) * theirs, (j + 1) * ours, end)
            yield (
                i - blocks.start,
                slice(start - i * theirs, stop - i * theirs),
                j - first,
                slice(start - j * ours, stop - j * ours),
            )
            start = stop

    def _move(self, given: "_Values", wanted: "_Values") -> None:
        """Copy values [layers, planes, heads, tokens, dim] to a target of the same shape, converting the dtype."""
        if self.source.dtype == self.target.dtype:
            wanted.numbers[...] = given.numbers
            if wanted.scales is not None:
                wanted.scales[...] = given.scales
            return
        layers = max(1, _CONVERT_ELEMENTS * len(given.numbers) // given.numbers.size)
        for i in range(0, len(given.numbers), layers):
            some = slice(i, i + layers)
            _store(_floats(given[some], self.source.dtype), wanted[some], self.target.dtype)

    @staticmethod
    def _view(pages: Pages, layout: KvLayout) -> "_Values":
        """Create a view of all pages as values and scales."""
        outer, tokens, dim = (
            (-1, layout.num_layers, layout.planes, layout.num_kv_heads),
            layout.block_tokens,
            layout.head_dim,
        )
        stored = _STORED[layout.dtype]
        if layout.dtype not in CODED:
            return _Values(pages.view(stored).reshape(*outer, tokens, dim), None)
        runs = pages.view(np.dtype([("codes", stored, (tokens, dim)), ("scales", _SCALE, (tokens,))])).reshape(outer)
        return _Values(runs["codes"], runs["scales"])


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Writable views of KV values and scales in pages."""

    numbers: npt.NDArray[Any]
    """Values [..., layers, planes, heads, tokens, dim]."""
    scales: npt.NDArray[np.float32] | None
    """Scales [..., layers, planes, heads, tokens]; `None` unless the values are codes."""

    def __getitem__(self, index: slice | tuple[int | slice, ...]) -> "_Values":
        return _Values(self.numbers[index], None if self.scales is None else self.scales[index])

    def at(self, page: int, heads: slice, slots: slice) -> "_Values":
        """Create a view of a range of heads and slots of one page."""
        return self[page, :, :, heads, slots]


@lru_cache(maxsize=256)
def plan(source: KvLayout, target: KvLayout) -> Relayout:
    """Plan the conversion of pages of `source` into pages of `target`.

    Args:
        source: layout of the peer's pages.
        target: layout of this worker's pages.

    Raises:
        TicketRejected: the layouts cannot be converted; `field` is the field of the layout, and the message contains
            both values and a remedy.
    """
    for field, remedy in _MUST_BE_EQUAL.items():
        theirs, ours = getattr(source, field), getattr(target, field)
        if theirs != ours:
            raise _impossible(field, theirs, ours, remedy)
    for layout in (source, target):
        if layout.dtype not in _STORED:
            raise _impossible("dtype", source.dtype, target.dtype, f"use one of {', '.join(_STORED)} on both")
    if source.windows:
        raise _impossible("windows", source.windows, target.windows, _MUST_BE_EQUAL["windows"])
    totals = [layout.total_kv_heads or layout.num_kv_heads for layout in (source, target)]
    if totals[0] != totals[1]:
        raise _impossible("total_kv_heads", totals[0], totals[1], _MUST_BE_EQUAL["model_digest"])
    if target.heads.start < source.heads.start or target.heads.stop > source.heads.stop:
        theirs, ours = (f"{r.start} to {r.stop - 1}" for r in (source.heads, target.heads))
        raise _impossible("num_kv_heads", theirs, ours, "read from a worker that has all required heads")
    return Relayout(source, target)


_MUST_BE_EQUAL = {
    "model_digest": "prefill and decode must run the same model files",
    "num_layers": "prefill and decode must run the same model files",
    "head_dim": "prefill and decode must run the same model files",
    "planes": "prefill and decode must run the same model files",
    "windows": "pages of layer groups cannot be converted",
}


def _impossible(field: str, theirs: object, ours: object, remedy: str) -> TicketRejected:
    return TicketRejected(
        f"KV layouts differ in {field}: the source has {theirs}, the reader {ours}, and no conversion exists; {remedy}",
        reason="TICKET_LAYOUT",
        field=field,
    )


def _floats(given: _Values, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return _widened(given.numbers)
    wide = fp8_codes.decode(given.numbers) if dtype == FP8 else given.numbers.astype(np.float32)
    if given.scales is not None:
        with np.errstate(invalid="ignore", over="ignore"):  # scales are sent by the peer and may have any bit pattern
            wide *= given.scales[..., None]
    return wide


def _store(wide: npt.NDArray[np.float32], wanted: _Values, dtype: str) -> None:
    if wanted.scales is not None:
        wanted.numbers[...], wanted.scales[...] = _coded(wide, dtype)
    elif dtype == "bfloat16":
        wanted.numbers[...] = _rounded(wide)
    elif dtype == "float32":
        wanted.numbers[...] = wide
    else:
        try:
            with np.errstate(over="raise"):
                wanted.numbers[...] = wide.astype(np.float16)
        except FloatingPointError:
            raise DtypeOverflow("the peer's KV has values outside the range of float16") from None


def _widened(bits: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _rounded(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = wide.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    result = odd.astype(np.uint16)
    nan = np.isnan(wide)
    if nan.any():
        result[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x0040
    return result


def _coded(wide: npt.NDArray[np.float32], dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Quantize rows to codes and scales, as the kernels do; a row with a non-finite value gets the scale NaN."""
    largest = fp8_codes.MAX_FP8 if dtype == FP8 else _MAX_INT8
    max_abs = np.abs(wide).max(axis=-1)
    with np.errstate(all="ignore"):
        inverse = np.where(max_abs > _MIN_WITH_INVERSE, largest / max_abs, np.float32(0))
        codes = wide * inverse[..., None]
        scales = max_abs / largest + max_abs * np.float32(0)
    codes[~np.isfinite(max_abs)] = 0
    if dtype == FP8:
        return fp8_codes.encode(codes), scales
    return np.rint(codes, out=codes).astype(np.int8), scales
