"""Logit kernels: bias, penalties, bans and grammar masks on the device, and log-probabilities of sampled tokens.

All computations are in float64, as in the host's sampler (`engine/execute/run/sampler.py`), so that a token does not
depend on the device that samples it. Adjustments are lists of tokens, not tables over the vocabulary, so that rows
without adjustments cost nothing.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.logit_rows import Adjustments, TokenLists

_ADD, _REPEAT, _TAKE, _BAN = range(4)


@triton.jit(do_not_specialize=["vocabulary"])
def _adjust_listed(
    logits: tl.tensor,
    starts: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    vocabulary: tl.tensor,
    what: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    entry = begin + tl.program_id(1) * block + tl.arange(0, block)
    is_entry = entry < end
    token = tl.load(ids + entry, mask=is_entry, other=0)
    is_entry = is_entry & (token >= 0) & (token < vocabulary)
    at = logits + row.to(tl.int64) * vocabulary + token
    given = tl.load(at, mask=is_entry, other=0.0)
    value = tl.load(values + entry, mask=is_entry, other=1.0)
    if what == 0:
        given = given + value
    elif what == 1:
        given = tl.where(given > 0, given / value, given * value)
    elif what == 2:
        given = given - value
    else:
        given = tl.zeros([block], tl.float64) + float("-inf")
    tl.store(at, given, mask=is_entry)


@triton.jit(do_not_specialize=["vocabulary", "words"])
def _adjust_allowed(
    logits: tl.tensor, allowed: tl.tensor, vocabulary: tl.tensor, words: tl.tensor, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    word = tl.load(allowed + row * words + token // 32, mask=token // 32 < words, other=0)
    is_out = ((word >> (token % 32)) & 1) == 0
    never = tl.zeros([block], tl.float64) + float("-inf")
    tl.store(logits + row * vocabulary + token, never, mask=is_out & (token < vocabulary))


def adjust_logits(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    """See `DeviceOps.adjust_logits`. Memory traffic in bytes: 12 R V for the copy, 24 per listed token, V / 8 per row
    with a grammar, and 8 per token that the grammar forbids. Penalties follow Keskar et al., CTRL, 2019, and OpenAI's
    API.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.ready("logits", logits)
    check.typed("logits", logits, torch.float32)
    rows, vocabulary = logits.shape
    out = logits.to(torch.float64, memory_format=torch.contiguous_format)
    for name, what in (("bias", _ADD), ("seen", _REPEAT), ("generated", _TAKE), ("banned", _BAN)):
        lists: TokenLists | None = getattr(adjustments, name)
        if lists is not None:
            _check_lists(name, lists, logits)
            c = choose("adjust_listed", logits.device)
            grid = (rows, triton.cdiv(lists.longest, c.sizes["block"]))
            c.run(
                _adjust_listed, grid, out, lists.starts, lists.ids, lists.values, vocabulary, what=what,
                block=c.sizes["block"],
            )  # fmt: skip
    if adjustments.allowed is not None:
        check.ready("allowed", adjustments.allowed, logits)
        check.typed("allowed", adjustments.allowed, torch.int32)
        check.contiguous("allowed", adjustments.allowed)
        words = adjustments.allowed.shape[1]
        check.shaped("allowed", adjustments.allowed, rows, words)
        c = choose("adjust_allowed", logits.device)
        block = c.sizes["block"]
        c.run(
            _adjust_allowed,
            (rows, triton.cdiv(vocabulary, block)),
            out,
            adjustments.allowed,
            vocabulary,
            words,
            block=block,
        )
    return out


def _check_lists(name: str, lists: TokenLists, logits: torch.Tensor) -> None:
    check.ready(name, lists.starts, lists.ids, lists.values, logits)
    check.typed(f"{name}.starts", lists.starts, torch.int32)
    check.typed(f"{name}.ids", lists.ids, torch.int32)
    check.typed(f"{name}.values", lists.values, torch.float64)
    check.shaped(f"{name}.starts", lists.starts, logits.shape[0] + 1)
    check.shaped(f"{name}.values", lists.values, len(lists.ids))
    for part in (lists.starts, lists.ids, lists.values):
        check.contiguous(name, part)


@triton.jit(do_not_specialize=["vocabulary"])
def _sum_chunks(
    peaks: tl.tensor, sums: tl.tensor, logits: tl.tensor, vocabulary: tl.tensor, row_stride: tl.tensor,
    chunk: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * chunk + tl.arange(0, chunk)
    given = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocabulary, other=float("-inf"))
    peak = tl.max(given, axis=0).to(tl.float64)
    reached = tl.where(peak == float("-inf"), 0.0, peak)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(given.to(tl.float64) - reached), axis=0))


@triton.jit(do_not_specialize=["chunks"])
def _log_probabilities(
    out: tl.tensor, peaks: tl.tensor, sums: tl.tensor, logits: tl.tensor, tokens: tl.tensor, chunks: tl.tensor,
    row_stride: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    part = tl.arange(0, width)
    found = tl.load(peaks + row * chunks + part, mask=part < chunks, other=float("-inf"))
    mass = tl.load(sums + row * chunks + part, mask=part < chunks, other=0.0)
    peak = tl.max(found, axis=0)
    chosen = tl.load(logits + row.to(tl.int64) * row_stride + tl.load(tokens + row)).to(tl.float64)
    tl.store(out + row, chosen - peak - tl.log(tl.sum(mass * tl.exp(found - peak), axis=0)))


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See `DeviceOps.log_probabilities`. The rows are read once, 4 R V bytes, in chunks, whose sums are merged.

    Args:
        logits: [R, V] float32, finite.
        tokens: [R] int64, below V.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.ready("logits", logits, tokens)
    check.typed("logits", logits, torch.float32)
    check.typed("tokens", tokens, torch.int64)
    check.dense("logits", logits)
    check.shaped("tokens", tokens, logits.shape[0])
    check.contiguous("tokens", tokens)
    rows, vocabulary = logits.shape
    c = choose("log_probabilities", logits.device)
    chunks = triton.cdiv(vocabulary, c.sizes["chunk"])
    out = torch.empty(rows, dtype=torch.float64, device=logits.device)
    peaks, sums = torch.empty(2, rows, chunks, dtype=torch.float64, device=logits.device)
    c.run(
        _sum_chunks, (rows, chunks), peaks, sums, logits, vocabulary, logits.stride(0), chunk=c.sizes["chunk"]
    )  # fmt: skip
    c.run(
        _log_probabilities, (rows,), out, peaks, sums, logits, tokens, chunks, logits.stride(0),
        width=triton.next_power_of_2(chunks),
    )  # fmt: skip
    return out
