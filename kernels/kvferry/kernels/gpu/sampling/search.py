"""Search for a position in a row's tokens, ordered by descending weight.

The histogram selects the bin. The tokens of the bin are listed, and their keys bisected, until one key remains between
the bounds. A bin rarely has more than a few hundred tokens, so that the list fits one tile of registers.
"""

import triton
import triton.language as tl

from kvferry.kernels.gpu.sampling.bins import REST_BITS, TOP, key_of, load_bins, mass_of, rest_of

_REST_BITS = tl.constexpr(REST_BITS)
_TOP = tl.constexpr(TOP)
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def select_bin(
    histogram: tl.tensor, target: tl.tensor, by_count: tl.constexpr, passes: tl.constexpr, bins: tl.constexpr
) -> tl.tensor:
    """Select the first bin at which the sum of counts or weights reaches a target, or exceeds it if `passes`; if
    rounding leaves none, the last bin with tokens. Return (bin, number of heavier tokens, sum of their weights)."""
    at = tl.arange(0, bins)
    counts, masses = load_bins(histogram, bins)
    if by_count:
        is_reached = tl.cumsum(counts, axis=0).to(tl.float64) >= target
    elif passes:
        is_reached = tl.cumsum(masses, axis=0) > target
    else:
        is_reached = tl.cumsum(masses, axis=0) >= target
    bin_ = tl.min(tl.where(is_reached & (counts > 0), at, bins), axis=0)
    bin_ = tl.where(bin_ < bins, bin_, tl.max(tl.where(counts > 0, at, 0), axis=0))
    return bin_, tl.sum(tl.where(at < bin_, counts, 0), axis=0), tl.sum(tl.where(at < bin_, masses, 0.0), axis=0)


@triton.jit
def list_bin(
    listed: tl.tensor,
    keys: tl.tensor,
    cursor: tl.tensor,
    bin_: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    room: tl.constexpr,
    sweep: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """List the tokens of a bin with their keys, in any order; return their number, also if it exceeds `room`.

    Tokens are first selected by their logits, with a margin for rounding, since a comparison is cheaper than `exp`;
    tokens of neighboring bins get the key `_NO_KEY`.
    """
    top = (-(bin_.to(tl.int64) << _REST_BITS) + _TOP).to(tl.float64, bitcast=True)
    low = (-((bin_ + 1).to(tl.int64) << _REST_BITS) + _TOP).to(tl.float64, bitcast=True)
    margin = temperature * 1e-9 + tl.abs(peak) * 1e-15
    most = peak + temperature * tl.log(top) + margin
    least = peak + temperature * tl.log(low) - margin
    tl.debug_barrier()  # all threads have read the previous list
    for start in range(0, vocabulary, sweep):
        token = start + tl.arange(0, sweep)
        value = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float64)
        is_near = (value >= least) & (value <= most)
        if tl.max(is_near.to(tl.int32), axis=0) > 0:
            place = tl.atomic_add(cursor + tl.zeros_like(token), 1, mask=is_near, sem="relaxed")
            tl.store(listed + place, token, mask=is_near & (place < room))
    tl.debug_barrier()  # makes each thread's stores visible to the other threads
    found = tl.atomic_add(cursor, 0).to(tl.int32)
    tl.debug_barrier()
    if found <= room:
        for start in range(0, found, block):
            at = start + tl.arange(0, block)
            token = tl.load(listed + at, mask=at < found, other=0)
            value = tl.load(logits + token, mask=at < found, other=float("-inf")).to(tl.float64)
            key = key_of(value, peak, temperature)
            tl.store(keys + at, tl.where(key >> _REST_BITS == bin_, key, _NO_KEY), mask=at < found)
    tl.debug_barrier()
    return found


@triton.jit
def keys_from(
    start: tl.tensor,
    found: tl.tensor,
    listed: tl.tensor,
    keys: tl.tensor,
    bin_: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    room: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Return (keys, token ids) of a tile of a bin: of the list, or of the whole row if the list has no room; tokens of
    other bins have the key `_NO_KEY`."""
    at = start + tl.arange(0, block)
    if found <= room:
        key = tl.load(keys + at, mask=at < found, other=_NO_KEY)
        token = tl.load(listed + at, mask=at < found, other=0)
    else:
        value = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float64)
        key = key_of(value, peak, temperature)
        key = tl.where((key >> _REST_BITS == bin_) & (at < vocabulary), key, _NO_KEY)
        token = at
    return key, token


@triton.jit
def _together(
    count: tl.tensor, rests: tl.tensor, smallest: tl.tensor, largest: tl.tensor,
    other_count: tl.tensor, other_rests: tl.tensor, other_smallest: tl.tensor, other_largest: tl.tensor,
) -> tl.tensor:  # fmt: skip
    return (
        count + other_count,
        rests + other_rests,
        tl.minimum(smallest, other_smallest),
        tl.maximum(largest, other_largest),
    )


@triton.jit
def up_to(
    bound: tl.tensor,
    first: tl.tensor,
    found: tl.tensor,
    listed: tl.tensor,
    keys: tl.tensor,
    bin_: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    room: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Return (number, sum of `rest`) of the tokens of a bin whose keys are at most `bound`, and the smallest and the
    largest such key.

    Args:
        first: [block] int64: keys of the first tile, which are all in most cases.
    """
    is_in = first <= bound
    counts = is_in.to(tl.int64)
    rests = tl.where(is_in, rest_of(first), 0).to(tl.float64)
    smallest = tl.where(is_in, first, _NO_KEY)
    largest = tl.where(is_in, first, -1)
    for start in range(block, tl.where(found <= room, found, vocabulary), block):
        key, _ = keys_from(start, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block)
        is_in = key <= bound
        counts += is_in.to(tl.int64)
        rests += tl.where(is_in, rest_of(key), 0).to(tl.float64)
        smallest = tl.minimum(smallest, tl.where(is_in, key, _NO_KEY))
        largest = tl.maximum(largest, tl.where(is_in, key, -1))
    return tl.reduce((counts, rests, smallest, largest), 0, _together)


@triton.jit
def reach(
    target: tl.tensor,
    above: tl.tensor,
    mass_above: tl.tensor,
    found: tl.tensor,
    listed: tl.tensor,
    keys: tl.tensor,
    bin_: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    by_count: tl.constexpr,
    passes: tl.constexpr,
    room: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Find the key of a bin at which the sum in descending order of weights reaches a target; return (key, number of
    heavier tokens, sum of their weights, number of tokens with the key).

    Args:
        target: see `select_bin`.
        above: number of tokens in heavier bins.
        mass_above: sum of their weights.
    """
    first, _ = keys_from(0, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block)
    # The tokens up to `low` do not reach the target; those up to `high` do.
    high_count, rests, smallest, high = up_to(
        _NO_KEY - 1, first, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block
    )
    low = smallest - 1
    low_count = tl.zeros_like(high_count)
    low_rests = tl.zeros_like(mass_above)
    while (high_count - low_count > 1) & (high - low > 1):
        middle = low + (high - low) // 2
        count, rests, smallest, largest = up_to(
            middle, first, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block
        )
        if by_count:
            is_reached = (above + count).to(tl.float64) >= target
        elif passes:
            is_reached = mass_above + mass_of(bin_, count, rests) > target
        else:
            is_reached = mass_above + mass_of(bin_, count, rests) >= target
        low = tl.where(is_reached, low, middle)
        low_count = tl.where(is_reached, low_count, count)
        low_rests = tl.where(is_reached, low_rests, rests)
        high = tl.where(is_reached, largest, high)
        high_count = tl.where(is_reached, count, high_count)
    return high, above + low_count, mass_above + mass_of(bin_, low_count, low_rests), high_count - low_count


@triton.jit
def id_at(
    number: tl.tensor,
    equals: tl.tensor,
    wanted: tl.tensor,
    found: tl.tensor,
    listed: tl.tensor,
    keys: tl.tensor,
    bin_: tl.tensor,
    logits: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    room: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Return the id of a token among those with the key `wanted`, in ascending order of ids.

    Args:
        number: index of the token, from 0, below `equals`.
        equals: number of tokens with the key.
    """
    low = tl.zeros_like(number) - 1
    high = low + vocabulary
    low_count = tl.zeros_like(number)
    high_count = equals
    turn = tl.zeros_like(number)
    while (turn == 0) | (high_count - low_count > 1):  # the first turn finds the highest id
        middle = tl.where(turn == 0, high, low + (high - low) // 2)
        counts = tl.zeros([block], tl.int64)
        ids = tl.zeros([block], tl.int64) - 1
        for start in range(0, tl.where(found <= room, found, vocabulary), block):
            key, token = keys_from(start, found, listed, keys, bin_, logits, vocabulary, peak, temperature, room, block)
            is_in = (key == wanted) & (token <= middle)
            counts += is_in.to(tl.int64)
            ids = tl.maximum(ids, tl.where(is_in, token, -1).to(tl.int64))
        count = tl.sum(counts, axis=0)
        largest = tl.max(ids, axis=0)
        is_below = count <= number
        low = tl.where(is_below, middle, low)
        low_count = tl.where(is_below, count, low_count)
        high = tl.where(is_below, high, largest)
        high_count = tl.where(is_below, high_count, count)
        turn += 1
    return high
