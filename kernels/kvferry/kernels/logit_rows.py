"""Sampling inputs as tensors: logit adjustments (bias, penalties, bans, grammar) and parameters of the draw.

Lists are ragged: row r has the entries `starts[r] .. starts[r + 1] - 1` of flat tensors. A list contains each token at
most once, and token ids are below the vocabulary size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class TokenLists:
    """A list of token ids for each row, with a value for each token if the operation needs values."""

    starts: torch.Tensor
    """[R + 1] int32: start of each row's entries, then the total number of entries."""
    ids: torch.Tensor
    """[N] int32: token ids."""
    values: torch.Tensor
    """[N] float64: value of each token."""
    longest: int
    """Number of entries in the longest list, as a host integer."""


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Adjustments of logits, applied in the order of the fields; a field is `None` if no row uses it."""

    bias: TokenLists | None = None
    """Logit biases, which are added."""
    seen: TokenLists | None = None
    """Tokens of prompt or output, each with its row's repetition penalty: positive logits are divided by the penalty,
    negative logits are multiplied by it (Keskar et al., CTRL, 2019)."""
    generated: TokenLists | None = None
    """Tokens of the output, each with the amount to subtract: count * frequency penalty + presence penalty."""
    banned: TokenLists | None = None
    """Banned tokens; their values are ignored."""
    allowed: torch.Tensor | None = None
    """[R, words] int32: bit t % 32 of word t // 32 is set if a grammar allows token t. Tokens beyond the last word are
    not allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Sampling parameters of each row. All tensors are [R], on the device of the logits."""

    temperature: torch.Tensor
    """float64; 0 for greedy sampling, with the lowest id on ties."""
    top_k: torch.Tensor
    """int64; 0 keeps all tokens."""
    top_p: torch.Tensor
    """float64: cumulative probability to keep."""
    min_p: torch.Tensor
    """float64: minimum probability relative to the most likely token."""
    seed: torch.Tensor
    """int64: low 64 bits of the seed."""
    stream: torch.Tensor
    """int64: index of the row's sequence among the samples of its request."""
    position: torch.Tensor
    """int64: position of the token to sample, from the start of the prompt."""
