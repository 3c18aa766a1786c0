"""Attention metadata of a step's ragged batch: rows per sequence, context lengths, block tables, slot mapping.

The rows of all sequences are concatenated without padding:

    rows       [ a0 a1 a2 | b0 | c0 c1 ]        T rows
    queries        3        1      2            rows of each sequence
    contexts       3        9      7            context length of each sequence after this step's writes
    row r of a sequence has position p = context - queries + r  and attends to positions 0 .. p

If the last tokens of a context are a tree (`Trees`), a row attends to the tokens before the tree and to its path.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Attended = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Sequences whose last tokens are a tree, in topological order. A token's position is that of the tree's first
    token, the root, plus its depth; its key and value are at its place in the context."""

    sizes: npt.NDArray[np.int64]
    """[sequences]: number of tokens of the tree, at most 64, including the sequence's rows; 0 without a tree."""
    paths: npt.NDArray[np.int64]
    """[rows]: bit i is set if token i of the tree is the row's own token or one of its ancestors; 0 without a tree."""

    def attended(self, index: int, first: int, queries: int, context: int, window: int | None) -> Attended:
        """Return the tokens to which the rows of a sequence with a tree attend, [queries, context].

        Args:
            index: index of the sequence.
            first: index of its first row.
            queries: number of its rows.
            context: its context length in tokens.
            window: sliding window of the layer; `None` for full attention.
        """
        root = context - int(self.sizes[index])
        bits = (self.paths[first : first + queries, None] >> np.arange(int(self.sizes[index]))) & 1
        depth = np.cumsum(bits, axis=1) - 1  # of the path's tokens
        of_tree, before = bits == 1, np.ones((queries, root), np.bool_)
        if window is not None:
            of_tree &= depth > depth[:, -1:] - window
            before &= np.arange(root) > root + depth[:, -1:] - window
        return np.concatenate((before, of_tree), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Attention metadata of one step: host arrays for planning, `slots` on the model's device."""

    queries: npt.NDArray[np.int64]
    """[sequences]: number of rows of each sequence, at least 1."""
    contexts: npt.NDArray[np.int64]
    """[sequences]: context length of each sequence in tokens, at least its `queries`."""
    block_tables: npt.NDArray[np.int64]
    """[sequences, maximum number of blocks]: page id of each block, padded with 0."""
    slots: torch.Tensor
    """[rows] int64: KV slot of each row, page * block_tokens + offset in the page. Backends with `DeviceOps` also
    accept -1 for padding rows, whose keys and values are not written."""
    trees: Trees | None = None
    """Trees of the sequences; `None` without any."""

    @property
    def num_rows(self) -> int:
        """Total number of rows of all sequences."""
        return int(self.queries.sum())


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Parameters of the RMSNorm that is applied to queries and keys before rotation: to each head (Qwen 3), or to all
    heads of a row together (OLMo 2)."""

    query: torch.Tensor
    """Weight of the query norm, [head dim] or [heads * head dim]."""
    key: torch.Tensor
    """Weight of the key norm, [head dim] or [KV heads * head dim]."""
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRules:
    """Parameters of a layer's causal attention: scale, sliding window, soft cap, sinks."""

    scale: float
    """Factor by which attention scores are multiplied."""
    window: int | None = None
    """Sliding window: number of positions that a row attends to, including its own; `None` for full attention."""
    soft_cap: float | None = None
    """Cap of the scores: a scaled score s becomes cap * tanh(s / cap); `None` for no cap."""
    sinks: torch.Tensor | None = None
    """[H] float32: learned attention sinks, which are scores that count in the denominator of the softmax and have no
    value (Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2024, in the learned form);
    `None` without sinks."""

    @property
    def is_plain(self) -> bool:
        """Whether the rules consist only of a scale, as for `Ops.paged_attention`."""
        return self.window is None and self.soft_cap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class LatentUp:
    """Projections of latent vectors to keys and values."""

    keys: torch.Tensor
    """[H, plain, rank]: projection to the unrotated elements of keys."""
    values: torch.Tensor
    """[H, value, rank]"""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Matrices of all experts of a layer. The up outputs follow the gate outputs."""

    gate_up: torch.Tensor
    """[experts, 2 n, hidden]"""
    gate_up_bias: torch.Tensor | None
    """[experts, 2 n]; `None` without biases."""
    down: torch.Tensor
    """[experts, hidden, n]"""
    down_bias: torch.Tensor | None
    """[experts, hidden]; `None` without biases."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankWeights:
    """Update to some of a projection's outputs: y += (x A^T) B^T (Hu et al., LoRA, 2021)."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank], multiplied by the adapter's scale."""
    first: int
    """First column of the projection's outputs that is updated."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankGroup:
    """Rows of a step that get the same update."""

    rows: torch.Tensor
    """[G] int64: row indices, without duplicates."""
    weights: LowRankWeights


@dataclass(frozen=True, slots=True, eq=False)
class SingleRows:
    """Batch of sequences with one row each, described only on the device, so that captured launches can run with any
    context lengths. The result of a padding row, which has context 0, is zeros.
    """

    tables: torch.Tensor
    """[batch slots, blocks] int32: page id of each block; entries beyond a context are ignored."""
    places: torch.Tensor
    """[rows] int64: batch slot of each row, as an index into `tables`."""
    contexts: torch.Tensor
    """[rows] int64: context length of each row, at most `max_tokens`."""
    max_tokens: int
    """Maximum context length in tokens; bounds the memory for partial results."""
