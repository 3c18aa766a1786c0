"""Paged attention in torch: gathers the pages of sequences into contiguous memory, then calls fused attention.

Sequences with one row (decode) and similar lengths share a call. Their pages,

    [sequences, 2, K, blocks]  ->  [2, sequences, K, blocks * B, D]

are gathered by one `index_select` over rows of B * D values, so that keys and values are contiguous. The H / K query
heads that share a KV head are rows of one small matrix, without repeating keys. Shorter members of a group are masked,
and gathered values beyond their context lengths are first set to zero, because a weight of zero times NaN is NaN.
Sequences with more rows (prefill, and trees of draft tokens) have separate calls. Sliding windows are masks, planned
once per window. Torch's fused attention supports neither a soft cap nor sinks; attention with either is computed by
separate operations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.kernels.batch import Attended, AttentionBatch, AttentionRules
from kvferry.kernels.ops import AttentionPlan

_MAX_STRETCH = 2
"""Maximum ratio between the numbers of blocks of the longest and the shortest member of a group; bounds the padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Sequences with one row each that share an attention call."""

    rows: torch.Tensor | None
    """[sequences]: indices of the sequences' rows; `None` for the whole batch, in order."""
    page_rows: torch.Tensor
    """[planes * sequences * K * blocks]: indices of rows to gather from the pages viewed as [.., B * D], layer 0."""
    shape: tuple[int, int]
    """(number of sequences, blocks of the longest sequence)."""
    context: int | None
    """Context length of all members; `None` if the lengths differ, in which case `mask` and `beyond` are set."""
    mask: torch.Tensor | None
    """[sequences, 1, 1, blocks * B]: 0, or minus infinity beyond a sequence's context length."""
    beyond: torch.Tensor | None
    """Indices of the gathered rows of D values beyond the context lengths."""
    contexts: npt.NDArray[np.int64]
    """[sequences]: context lengths."""
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)
    """Masks by sliding window, computed at first use."""

    def mask_for(self, window: int | None) -> torch.Tensor | None:
        """Return the mask for a sliding window; `None` if the rows attend to all gathered tokens, or if the gathered
        tokens are truncated to the window because all lengths are equal."""
        if self.mask is None or window is None:
            return self.mask
        if window not in self.windowed:
            before = np.arange(self.mask.shape[-1]) < self.contexts[:, None] - window
            there = torch.from_numpy(before)[:, None, None, :].to(self.mask.device)
            self.windowed[window] = self.mask.masked_fill(there, -math.inf)
        return self.windowed[window]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A sequence with several rows."""

    first: int
    queries: int
    context: int
    page_rows: torch.Tensor
    mask: torch.Tensor | None
    """[queries, context]; `None` if the rows cover the whole context, so that a plain causal mask suffices."""
    attended: Callable[[int | None], Attended] | None = None
    """Tokens to which the rows of a tree attend, [queries, context], by sliding window; `None` without a tree."""
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)
    """Masks by sliding window, computed at first use."""

    def mask_for(self, rules: AttentionRules, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return the mask [queries, context] for a layer; `None` if a plain causal mask suffices."""
        window = self.context if rules.window is None else min(rules.window, self.context)
        if window == self.context and (self.mask is not None or _is_fused(rules)):
            return self.mask
        if window not in self.windowed:
            seen = torch.ones(self.queries, self.context, dtype=torch.bool, device=device)
            if self.attended is not None:
                seen = torch.from_numpy(self.attended(window)).to(device)
            else:
                seen.tril_(self.context - self.queries).triu_(self.context - self.queries - window + 1)
            self.windowed[window] = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)
        return self.windowed[window]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Plan of a step's attention."""

    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]


def plan_attention(batch: AttentionBatch, pages: torch.Tensor, num_heads: int) -> AttentionPlan:
    """See `Ops.plan_attention`. Gathers and masks are planned once for all layers."""
    firsts = np.concatenate(([0], np.cumsum(batch.queries)[:-1]))
    several = batch.queries > 1
    if batch.trees is not None:
        several = several | (batch.trees.sizes > 0)
    single = np.flatnonzero(~several)
    blocks = -(-batch.contexts // pages.shape[4])
    groups = tuple(
        _plan_group(batch, pages, members, firsts, blocks)
        for members in _alike(single[np.argsort(blocks[single], kind="stable")], blocks)
    )
    chunks = tuple(
        _plan_chunk(batch, pages, int(index), int(firsts[index]), int(blocks[index]))
        for index in np.flatnonzero(several)
    )
    return Plan(groups, chunks)


def _alike(by_length: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Split a list of sequences, sorted by length, into groups of similar length."""
    cut: list[npt.NDArray[np.int64]] = []
    start = 0
    for end in range(1, len(by_length) + 1):
        if end == len(by_length) or blocks[by_length[end]] > _MAX_STRETCH * blocks[by_length[start]]:
            cut.append(np.sort(by_length[start:end]))
            start = end
    return cut


def _plan_group(
    batch: AttentionBatch,
    pages: torch.Tensor,
    members: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
) -> Group:
    planes, heads, block_tokens = pages.shape[2:5]
    contexts = batch.contexts[members]
    longest = int(blocks[members].max())
    rows = _page_rows(batch.block_tables[members, :longest], pages)
    is_all = len(members) == batch.num_rows
    where = None if is_all else torch.from_numpy(firsts[members]).to(pages.device)
    shape = (len(members), longest)
    if int(contexts.min()) == int(contexts.max()):
        return Group(where, rows, shape, int(contexts[0]), None, None, contexts)
    outside = np.arange(longest * block_tokens) >= contexts[:, None]  # [sequences, blocks * B]
    there = torch.from_numpy(outside).to(pages.device)
    mask = torch.zeros(outside.shape, dtype=pages.dtype, device=pages.device).masked_fill_(there, -math.inf)
    gathered = np.broadcast_to(outside[None, :, None, :], (planes, len(members), heads, outside.shape[1]))
    beyond = torch.from_numpy(np.flatnonzero(gathered)).to(pages.device)
    return Group(where, rows, shape, None, mask[:, None, None, :], beyond, contexts)


def _plan_chunk(batch: AttentionBatch, pages: torch.Tensor, index: int, first: int, blocks: int) -> Chunk:
    queries, context = int(batch.queries[index]), int(batch.contexts[index])
    rows = _page_rows(batch.block_tables[index : index + 1, :blocks], pages)
    mask, attended = None, None
    if batch.trees is not None and batch.trees.sizes[index]:
        attended = partial(batch.trees.attended, index, first, queries, context)
        seen = torch.from_numpy(attended(None)).to(pages.device)
        mask = torch.zeros(queries, context, dtype=pages.dtype, device=pages.device).masked_fill_(~seen, -math.inf)
    elif queries < context:
        seen = torch.ones(queries, context, dtype=torch.bool, device=pages.device).tril_(context - queries)
        mask = torch.zeros(queries, context, dtype=pages.dtype, device=pages.device).masked_fill_(~seen, -math.inf)
    return Chunk(first, queries, context, rows, mask, attended)


def _page_rows(table: npt.NDArray[np.int64], pages: torch.Tensor) -> torch.Tensor:
    """Return the row indices into pages viewed as [pages * layers * planes * K, B * D], in the order [planes,
    sequences, K, blocks], layer 0. The planes are keys and values, or a single plane of latent vectors."""
    _, layers, planes, heads, _, _ = pages.shape
    halves = np.arange(planes)[:, None, None, None] * heads + np.arange(heads)[None, None, :, None]
    rows = torch.from_numpy((table[None, :, None, :] * (layers * planes * heads) + halves).reshape(-1))
    return rows.to(pages.device)


def paged_attention(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """See `Ops.paged_attention`."""
    return attend(q, pages, layer, plan, AttentionRules(scale))


def attend(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, rules: AttentionRules
) -> torch.Tensor:
    """See `Ops.attend`."""
    assert isinstance(plan, Plan)
    num_rows, num_heads, head_dim = q.shape
    _, _, _, kv_heads, block_tokens, _ = pages.shape
    # The view starts at `layer`, so that row indices for layer 0 select rows of this layer.
    stretch = pages.view(-1, block_tokens * head_dim)[layer * 2 * kv_heads :]
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend_group(q, stretch, plan.groups[0], kv_heads, rules)
    out = q.new_empty(num_rows, num_heads * head_dim)
    for group in plan.groups:
        assert group.rows is not None
        out[group.rows] = _attend_group(q.index_select(0, group.rows), stretch, group, kv_heads, rules)
    for chunk in plan.chunks:
        span = slice(chunk.first, chunk.first + chunk.queries)
        kv = stretch.index_select(0, chunk.page_rows).view(2, 1, kv_heads, -1, head_dim)[:, :, :, : chunk.context]
        rows = q[span].transpose(0, 1).unsqueeze(0)  # [1, H, queries, D]
        mask = chunk.mask_for(rules, pages.dtype, pages.device)
        if not _is_fused(rules):
            seen = _separate(rows, kv[0], kv[1], mask, rules)
        else:
            seen = F.scaled_dot_product_attention(
                rows, kv[0], kv[1], attn_mask=mask, is_causal=mask is None, scale=rules.scale, enable_gqa=True
            )
        out[span] = seen.squeeze(0).transpose(0, 1).flatten(1)
    return out


def _attend_group(
    q: torch.Tensor, stretch: torch.Tensor, group: Group, kv_heads: int, rules: AttentionRules
) -> torch.Tensor:
    """Compute the attention of a group: q [sequences, H, D] -> [sequences, H * D]."""
    sequences, num_heads, head_dim = q.shape
    gathered = stretch.index_select(0, group.page_rows)
    if group.beyond is not None:
        gathered.view(-1, head_dim).index_fill_(0, group.beyond, 0)
    kv = gathered.view(2, sequences, kv_heads, -1, head_dim)
    if group.context is not None:
        first = 0 if rules.window is None else max(0, group.context - rules.window)
        kv = kv[:, :, :, first : group.context]
    rows = q.reshape(sequences, kv_heads, num_heads // kv_heads, head_dim)
    mask = group.mask_for(rules.window)
    if not _is_fused(rules):
        seen = _separate(rows, kv[0], kv[1], mask, rules)
    else:
        seen = F.scaled_dot_product_attention(rows, kv[0], kv[1], attn_mask=mask, scale=rules.scale)
    return seen.reshape(sequences, num_heads * head_dim)


def _is_fused(rules: AttentionRules) -> bool:
    """Return whether torch's fused attention supports the rules."""
    return rules.soft_cap is None and rules.sinks is None


def _separate(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rules: AttentionRules
) -> torch.Tensor:
    """Compute attention with capped scores and sinks: q [S, heads, rows, D], keys and values [S, K, tokens, D]. Each KV
    head serves heads / K query heads; if heads = K, the query heads of a KV head are its rows."""
    repeats = q.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = (q @ keys.transpose(-1, -2)).float() * rules.scale
    if rules.soft_cap is not None:
        scores = torch.tanh(scores / rules.soft_cap) * rules.soft_cap
    if mask is not None:
        scores = scores + mask
    if rules.sinks is None:
        return torch.softmax(scores, dim=-1).to(values.dtype) @ values
    sinks = rules.sinks.view(1, q.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values
