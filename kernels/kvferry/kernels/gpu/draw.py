"""Sampling kernel: top k, top p, min p and the draw on the device, with the same tokens as the host's sampler.

The kept tokens are ordered by weight, lowest id first on ties, and a uniform number, keyed by (seed, stream, position),
selects a token (Philox4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). The kernel does
not sort: a position in that order is a weight and an index among equal weights. It bisects over the 64 bits of the
weight, with one sweep over the row per bit, until one weight remains between the bounds:

    sweep      count or mass of weights above `middle`   ->  is the position above or below?

Three positions are searched: the k-th token (by count), the end of top p (by mass) and the draw (by mass); min p needs
only a comparison. All computations are in float64. Sums differ from the host's sums only in the order of additions, so
the token is the same unless u is within about 1e-13 of a boundary.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.logit_rows import Draws


@triton.jit
def _above(
    weights: tl.tensor, vocabulary: tl.tensor, bound: tl.tensor, is_strict: tl.constexpr, block: tl.constexpr
) -> tl.tensor:
    """Compute (count, sum) of the weights above `bound`, or, unless `is_strict`, of those at least equal to it."""
    counts = tl.zeros([block], tl.int64)
    sums = tl.zeros([block], tl.float64)
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        weight = tl.load(weights + token, mask=token < vocabulary, other=-1.0)
        is_above = weight > bound if is_strict else weight >= bound
        counts += is_above.to(tl.int64)
        sums += tl.where(is_above, weight, 0.0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _reached(
    weights: tl.tensor,
    vocabulary: tl.tensor,
    target: tl.tensor,
    by_count: tl.constexpr,
    passes: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Find the weight at which the sum in descending order reaches a target; return (weight, sum above it, number of
    equal weights). The weight is the largest w such that all weights >= w add up to the target, or exceed it if
    `passes`. Bisecting over bits is valid, since the bits of non-negative floats are ordered like the floats.
    """
    low = tl.zeros([], tl.int64)  # the sum of all weights >= `low` reaches the target
    high = tl.full([], 0x3FF0000000000001, tl.int64)  # just above 1.0, the largest weight
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass = _above(weights, vocabulary, middle.to(tl.float64, bitcast=True), False, block)
        if by_count:
            is_reached = count.to(tl.float64) >= target
        elif passes:
            is_reached = mass > target
        else:
            is_reached = mass >= target
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    weight = low.to(tl.float64, bitcast=True)
    above, mass_above = _above(weights, vocabulary, weight, True, block)
    with_it, _ = _above(weights, vocabulary, weight, False, block)
    return weight, above, mass_above, with_it - above


@triton.jit
def _id_of(
    weights: tl.tensor, vocabulary: tl.tensor, weight: tl.tensor, number: tl.tensor, block: tl.constexpr
) -> tl.tensor:
    """Return the id of the `index`-th token (from 0) whose weight equals `weight`; if there are fewer, return the id of
    the last one."""
    seen = tl.zeros([], tl.int64)
    found = tl.zeros([], tl.int64)
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        is_equal = tl.load(weights + token, mask=token < vocabulary, other=-1.0) == weight
        place = seen + tl.cumsum(is_equal.to(tl.int64), axis=0) - 1
        wanted = is_equal & (place <= number)
        found = tl.maximum(found, tl.max(tl.where(wanted, token, 0), axis=0).to(tl.int64))
        seen += tl.sum(is_equal.to(tl.int64), axis=0)
    return found


@triton.jit
def _uniform(seed: tl.tensor, stream: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Generate a uniform random number in [0, 1) with 53 random bits, equal to the result of `core.philox.uniform`."""
    zero = (position & 0).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position.to(tl.uint32), stream.to(tl.uint32), zero, zero)
    return ((first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["vocabulary"])
def _sample(
    out: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    streams: tl.tensor,
    positions: tl.tensor,
    vocabulary: tl.tensor,
    row_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    given = logits + row.to(tl.int64) * row_stride
    peaks = tl.full([block], float("-inf"), tl.float64)
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        value = tl.load(given + token, mask=token < vocabulary, other=float("-inf")).to(tl.float64)
        peaks = tl.maximum(peaks, value)
    peak = tl.max(peaks, axis=0)
    temperature = tl.load(temperatures + row)
    weights += row.to(tl.int64) * vocabulary
    for start in range(0, vocabulary, block):
        token = start + tl.arange(0, block)
        value = tl.load(given + token, mask=token < vocabulary, other=float("-inf")).to(tl.float64)
        if temperature == 0.0:
            weight = tl.where(value == peak, 1.0, 0.0).to(tl.float64)
        else:
            weight = tl.exp((value - peak) / temperature)
        tl.store(weights + token, weight, mask=token < vocabulary)
    tl.debug_barrier()  # makes each thread's stores visible to the other threads

    if temperature == 0.0:
        token = _id_of(weights, vocabulary, tl.full([], 1.0, tl.float64), tl.zeros([], tl.int64), block)
    else:
        token = _draw(
            weights,
            vocabulary,
            tl.load(top_ks + row),
            tl.load(top_ps + row),
            tl.load(min_ps + row),
            _uniform(tl.load(seeds + row), tl.load(streams + row), tl.load(positions + row)),
            block,
        )
    tl.store(out + row, token)


@triton.jit
def _draw(
    weights: tl.tensor,
    vocabulary: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    u: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    # Kept tokens: all tokens with weights above `edge`, and the first `equals` tokens with weight `edge`. Initially all
    # tokens.
    num_kept, kept_mass = _above(weights, vocabulary, tl.zeros([], tl.float64), False, block)
    edge = tl.zeros([], tl.float64)
    if (top_k > 0) & (top_k < num_kept):
        edge, above, above_mass, _ = _reached(weights, vocabulary, top_k.to(tl.float64), True, False, block)
        num_kept = top_k
        kept_mass = above_mass + (top_k - above).to(tl.float64) * edge
    if top_p < 1.0:
        target = top_p * kept_mass
        weight, above, above_mass, equals = _reached(weights, vocabulary, target, False, False, block)
        # Shortest prefix that reaches the target: as many tokens of equal weight as needed, at least one.
        lacking = tl.ceil((target - above_mass) / tl.where(weight > 0.0, weight, 1.0)).to(tl.int64)
        held = above + tl.minimum(tl.maximum(lacking, 1), equals)
        if held < num_kept:
            num_kept = held
            kept_mass = above_mass + (held - above).to(tl.float64) * weight
    if min_p > 0.0:
        heavy, heavy_mass = _above(weights, vocabulary, min_p, False, block)
        if heavy < num_kept:
            num_kept = heavy
            kept_mass = heavy_mass
    weight, above, above_mass, equals = _reached(weights, vocabulary, u * kept_mass, False, True, block)
    number = tl.floor((u * kept_mass - above_mass) / tl.where(weight > 0.0, weight, 1.0)).to(tl.int64)
    number = tl.minimum(tl.maximum(number, 0), equals - 1)
    if above + number >= num_kept:  # only rounding can make u * sum reach the sum; take the last kept token
        weight, above, above_mass, equals = _reached(weights, vocabulary, num_kept.to(tl.float64), True, False, block)
        number = num_kept - 1 - above
    return _id_of(weights, vocabulary, weight, number, block)


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See `DeviceOps.sample`. R V logits are read twice, and 8 R V bytes of weights are written. Draw, top k and top p
    then each read the weights in up to 66 sweeps, from the cache if they fit.

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
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, vocabulary, dtype=torch.float64, device=logits.device)
    c = choose("sample", logits.device)
    c.run(
        _sample, (rows,), out, weights, logits, *(part for _, part, _ in parts), vocabulary, logits.stride(0),
        block=c.sizes["block"],
    )  # fmt: skip
    return out
