"""Weights of tokens as integers, and the histogram of a row's weights.

The weight of a token is exp((logit - peak) / temperature), from 0 to 1, in float64. Its *key* is the distance of its
bits from those of 1.0, so that keys ascend from 0 as weights descend, and equal weights have equal keys. Bin b has the
keys from b * 2^46 to (b + 1) * 2^46: a 64th of an octave, 64 octaves. Lighter weights are in no bin; each is less than
2^-64 of the heaviest weight, so they change no sum and no token of them is drawn.

    key      = TOP - bits(weight)
    octave   = bin // 64
    weight   = 2^-(octave + 1) * (2 - (bin % 64) / 64 - rest / 2^52),   rest = key - bin * 2^46

The weight is linear in `rest` within a bin. A sum of weights in a bin is thus a sum of integers, which has the same
result in every order: atomic additions by many programs are repeatable. A bin is one integer, its number of tokens and
the sum of their `rest`, of which the histogram keeps 24 bits: a bin's sum is exact within 2^-30 of its value.
"""

import triton
import triton.language as tl

TOP = 0x3FF0000000000000
"""Bits of 1.0 in float64."""
BINS = 4096
"""Bins of a row's histogram: 64 octaves of 64 bins."""
REST_BITS = 46
"""log2 of a bin's width in keys."""
MAX_VOCABULARY = 1 << 19
"""Maximum number of tokens, so that a bin's number of tokens and its sum do not overflow."""

_TOP = tl.constexpr(TOP)
_REST_BITS = tl.constexpr(REST_BITS)
_REST_MASK = tl.constexpr((1 << REST_BITS) - 1)
_COUNT_AT = 44
"""Position of the number of tokens in a bin's integer; the sum of their `rest` is below it."""
_COUNT_BITS = tl.constexpr(_COUNT_AT)
_ONE_TOKEN = tl.constexpr(1 << _COUNT_AT)
_SUM_MASK = tl.constexpr((1 << _COUNT_AT) - 1)
_CUT_BITS = tl.constexpr(REST_BITS - 24)
_CUT_UNIT = tl.constexpr(float(1 << (REST_BITS - 24)))


@triton.jit
def key_of(logit: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return the key of the weight of each logit."""
    return key_of_weight(tl.exp((logit - peak) / temperature))


@triton.jit
def key_of_weight(weight: tl.tensor) -> tl.tensor:
    """Return the key of a weight from 0 to 1."""
    return -weight.to(tl.int64, bitcast=True) + _TOP


@triton.jit
def weight_of(key: tl.tensor) -> tl.tensor:
    """Return the weight of a key."""
    return (-key + _TOP).to(tl.float64, bitcast=True)


@triton.jit
def mass_of(bin_: tl.tensor, count: tl.tensor, rests: tl.tensor) -> tl.tensor:
    """Return the sum of weights in a bin.

    Args:
        bin_: number of the bin.
        count: number of weights.
        rests: sum of their `rest`, float64.
    """
    scale = ((1022 - bin_ // 64).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    top = 2.0 - (bin_ % 64).to(tl.float64) * 0.015625
    return scale * (count.to(tl.float64) * top - rests * 2.220446049250313e-16)


@triton.jit
def load_bins(histogram: tl.tensor, bins: tl.constexpr) -> tl.tensor:
    """Return (numbers of tokens [bins] int64, sums of weights [bins] float64)."""
    at = tl.arange(0, bins)
    both = tl.load(histogram + at)
    counts = both >> _COUNT_BITS
    return counts, mass_of(at, counts, (both & _SUM_MASK).to(tl.float64) * _CUT_UNIT)  # an integer could overflow


@triton.jit
def rest_of(key: tl.tensor) -> tl.tensor:
    """Return the position of each key in its bin."""
    return key & _REST_MASK


@triton.jit(do_not_specialize=["vocabulary"])
def find_peaks(
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    row_stride: tl.tensor,
    chunk: tl.constexpr,
) -> None:
    """Write the largest logit of each chunk of a row and its lowest id. Grid: (rows, chunks)."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * chunk + tl.arange(0, chunk)
    value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(
        tl.float64
    )
    peak = tl.max(value, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(peak_ids + place, tl.min(tl.where(value == peak, token, 0x7FFFFFFF), axis=0))


@triton.jit
def peak_of(peaks: tl.tensor, peak_ids: tl.tensor, row: tl.tensor, chunks: tl.tensor, width: tl.constexpr) -> tl.tensor:
    """Return the largest logit of a row and its lowest id.

    Args:
        width: power of 2, at least `chunks`.
    """
    part = tl.arange(0, width)
    found = tl.load(peaks + row * chunks + part, mask=part < chunks, other=float("-inf"))
    ids = tl.load(peak_ids + row * chunks + part, mask=part < chunks, other=0x7FFFFFFF)
    peak = tl.max(found, axis=0)
    return peak, tl.min(tl.where(found == peak, ids, 0x7FFFFFFF), axis=0)


@triton.jit(do_not_specialize=["vocabulary", "chunks"])
def fill_bins(
    state: tl.tensor,
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    row_stride: tl.tensor,
    state_stride: tl.tensor,
    width: tl.constexpr,
    bins: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Add a chunk of a row to the row's histogram; greedy rows need none. Grid: (rows, chunks).

    Args:
        state: [R, bins + ..] int64: the bins; zero before the first chunk.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        return
    peak, _ = peak_of(peaks, peak_ids, row, chunks, width)
    token = tl.program_id(1) * chunk + tl.arange(0, chunk)
    is_token = token < vocabulary
    value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=is_token, other=float("-inf")).to(tl.float64)
    key = key_of(value, peak, temperature)
    bin_ = key >> _REST_BITS
    is_token = is_token & (bin_ < bins)
    one = (rest_of(key) >> _CUT_BITS) + _ONE_TOKEN
    tl.atomic_add(state + row.to(tl.int64) * state_stride + bin_, one, mask=is_token, sem="relaxed")
