"""Sampling: top k, top p, min p and the draw on the device, with the same tokens as the host's sampler.

The kept tokens are ordered by weight, lowest id first on ties, and a uniform number, keyed by (seed, stream, position),
selects a token (Philox4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). Nothing is sorted.
Three launches:

    find_peaks   rows x chunks   largest logit of each chunk and its lowest id
    fill_bins    rows x chunks   histogram of the row's weights: number and sum by bin (`bins`)
    _sample      rows            searches the histogram, then one bin (`search`)

Up to four positions are searched: the k-th token (by count), the end of top p (by mass), min p and the draw (by mass).
Weights are float64. Sums differ from the host's sums only by rounding, so the token is the same unless u is within
about 1e-9 of a boundary. The number of launches and programs does not depend on the rows' parameters.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.gpu.sampling.bins import (
    BINS,
    MAX_VOCABULARY,
    REST_BITS,
    fill_bins,
    find_peaks,
    key_of_weight,
    load_bins,
    mass_of,
    peak_of,
    weight_of,
)
from kvferry.kernels.gpu.sampling.search import id_at, keys_from, list_bin, reach, select_bin, up_to
from kvferry.kernels.logit_rows import Draws

_REST_BITS = tl.constexpr(REST_BITS)
_SEARCHES = 5
"""Maximum number of searches of a row; each lists its bin with a cursor of its own."""


@triton.jit
def _uniform(seed: tl.tensor, stream: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Generate a uniform random number in [0, 1) with 53 random bits, equal to the result of `core.philox.uniform`."""
    zero = (position & 0).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position.to(tl.uint32), stream.to(tl.uint32), zero, zero)
    return ((first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _search(
    search: tl.constexpr,
    target: tl.tensor,
    state: tl.tensor,
    listed: tl.tensor,
    keys: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    by_count: tl.constexpr,
    passes: tl.constexpr,
    bins: tl.constexpr,
    room: tl.constexpr,
    sweep: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Search a row for a target; return (bin, listed tokens, key, number of heavier tokens, sum of their weights,
    number of tokens with the key)."""
    bin_, above, mass_above = select_bin(state, target, by_count, passes, bins)
    found = list_bin(
        listed, keys, state + bins + search, bin_, logits, vocabulary, peak, temperature, room, sweep, block
    )
    key, above, mass_above, equals = reach(
        target, above, mass_above, found, listed, keys, bin_, logits, vocabulary, peak, temperature, by_count, passes,
        room, block,
    )  # fmt: skip
    return bin_, found, key, above, mass_above, equals


@triton.jit(do_not_specialize=["vocabulary", "chunks"])
def _sample(
    out: tl.tensor,
    state: tl.tensor,
    listed: tl.tensor,
    keys: tl.tensor,
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    streams: tl.tensor,
    positions: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    row_stride: tl.tensor,
    state_stride: tl.tensor,
    width: tl.constexpr,
    bins: tl.constexpr,
    room: tl.constexpr,
    sweep: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Draw the token of a row. Grid: (rows,).

    Args:
        out: [R] int64.
        state: [R, bins + searches] int64: see `fill_bins`, then cursors, which are zero.
        listed: [R, room] int32, and `keys`, [R, room] int64: space for the tokens of a bin.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    peak, peak_id = peak_of(peaks, peak_ids, row, chunks, width)
    if temperature == 0.0:
        tl.store(out + row, peak_id.to(tl.int64))
        return
    state += row.to(tl.int64) * state_stride
    listed += row.to(tl.int64) * room
    keys += row.to(tl.int64) * room
    logits += row.to(tl.int64) * row_stride

    # Kept tokens: the first `num_kept` in the order of the draw, with the sum `kept_mass`. Initially all tokens.
    counts, masses = load_bins(state, bins)
    num_binned = tl.sum(counts, axis=0)
    kept_mass = tl.sum(masses, axis=0)
    num_kept = vocabulary.to(tl.int64)
    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (top_k < num_kept):
        num_kept = top_k
        if top_k < num_binned:  # otherwise the tokens that are cut have no weight
            _, _, key, above, above_mass, _ = _search(
                0, top_k.to(tl.float64), state, listed, keys, logits, vocabulary, peak, temperature, True, False, bins,
                room, sweep, block,
            )  # fmt: skip
            kept_mass = above_mass + (top_k - above).to(tl.float64) * weight_of(key)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        target = top_p * kept_mass
        _, _, key, above, above_mass, equals = _search(
            1, target, state, listed, keys, logits, vocabulary, peak, temperature, False, False, bins, room, sweep,
            block,
        )  # fmt: skip
        # Shortest prefix that reaches the target: as many tokens of equal weight as needed, at least one.
        lacking = tl.ceil((target - above_mass) / weight_of(key)).to(tl.int64)
        held = above + tl.minimum(tl.maximum(lacking, 1), equals)
        if held < num_kept:
            num_kept = held
            kept_mass = above_mass + (held - above).to(tl.float64) * weight_of(key)
    min_p = tl.load(min_ps + row)
    if min_p > 0.0:
        least = key_of_weight(min_p)
        if least >> _REST_BITS < bins:
            bin_ = (least >> _REST_BITS).to(tl.int32)
            found = list_bin(
                listed, keys, state + bins + 2, bin_, logits, vocabulary, peak, temperature, room, sweep, block
            )
            first, _ = keys_from(0, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block)
            count, rests, _, _ = up_to(
                least, first, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block
            )
            at = tl.arange(0, bins)
            counts, masses = load_bins(state, bins)
            heavy = tl.sum(tl.where(at < bin_, counts, 0), axis=0) + count
            if heavy < num_kept:
                num_kept = heavy
                kept_mass = tl.sum(tl.where(at < bin_, masses, 0.0), axis=0) + mass_of(bin_, count, rests)
    u = _uniform(tl.load(seeds + row), tl.load(streams + row), tl.load(positions + row))
    bin_, found, key, above, above_mass, equals = _search(
        3, u * kept_mass, state, listed, keys, logits, vocabulary, peak, temperature, False, True, bins, room, sweep,
        block,
    )  # fmt: skip
    number = tl.floor((u * kept_mass - above_mass) / weight_of(key)).to(tl.int64)
    number = tl.minimum(tl.maximum(number, 0), equals - 1)
    if above + number >= num_kept:  # only rounding can make u * sum reach the sum; take the last kept token
        bin_, found, key, above, above_mass, equals = _search(
            4, num_kept.to(tl.float64), state, listed, keys, logits, vocabulary, peak, temperature, True, False, bins,
            room, sweep, block,
        )  # fmt: skip
        number = num_kept - 1 - above
    token = id_at(number, equals, key, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block)
    tl.store(out + row, token)


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See `DeviceOps.sample`. The logits are read twice, and once more for the draw, top k, top p and min p each; the
    histograms are 32 KiB per row.

    Args:
        logits: [R, V] float32, or float64 as returned by `adjust_logits`; no NaN, at least one finite value per row.
        draws: sampling parameters of each row.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.ready("logits", logits)
    if logits.dtype != torch.float64:
        check.typed("logits", logits, torch.float32)
    check.dense("logits", logits)
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise check.fault("logits", "SHAPE", f"a row has at most {MAX_VOCABULARY} tokens, not {vocabulary}")
    parts = (
        ("temperature", draws.temperature, torch.float64),
        ("top_k", draws.top_k, torch.int64),
        ("top_p", draws.top_p, torch.float64),
        ("min_p", draws.min_p, torch.float64),
        ("seed", draws.seed, torch.int64),
        ("stream", draws.stream, torch.int64),
        ("position", draws.position, torch.int64),
    )
    for name, part, dtype in parts:
        check.ready(name, part, logits)
        check.typed(name, part, dtype)
        check.shaped(name, part, rows)
        check.contiguous(name, part)
    c = choose("sample", logits.device)
    parallel = choose("sample_chunks", logits.device)
    room, chunk = c.sizes["room"], parallel.sizes["chunk"]
    chunks = triton.cdiv(vocabulary, chunk)
    width = triton.next_power_of_2(chunks)
    device = logits.device
    peaks = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    peak_ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    state = torch.zeros(rows, BINS + _SEARCHES, dtype=torch.int64, device=device)
    listed = torch.empty(rows, room, dtype=torch.int32, device=device)
    keys = torch.empty(rows, room, dtype=torch.int64, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    stride = logits.stride(0)
    parallel.run(find_peaks, (rows, chunks), peaks, peak_ids, logits, vocabulary, stride, chunk=chunk)
    parallel.run(
        fill_bins, (rows, chunks), state, peaks, peak_ids, logits, draws.temperature, vocabulary, chunks, stride,
        state.stride(0), width=width, bins=BINS, chunk=chunk,
    )  # fmt: skip
    c.run(
        _sample, (rows,), out, state, listed, keys, peaks, peak_ids, logits, *(part for _, part, _ in parts),
        vocabulary, chunks, stride, state.stride(0), width=width, bins=BINS, room=room, sweep=c.sizes["sweep"],
        block=c.sizes["block"],
    )  # fmt: skip
    return out
