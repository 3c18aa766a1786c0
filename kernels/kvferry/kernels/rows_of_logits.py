"""What requests wish of their rows of logits, as tensors: what to change before a draw, and how to draw.

Lists are ragged: row r's entries are `starts[r] .. starts[r + 1]` of flat tensors. A token stands in a list once, and
below the vocabulary.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class TokenLists:
    """For each row some token ids, each with a number where the list's use has one."""

    starts: torch.Tensor
    """[R + 1] int32, from 0."""
    ids: torch.Tensor
    """[N] int32."""
    values: torch.Tensor
    """[N] float64."""
    longest: int
    """Entries of the longest list, so that nobody must ask the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Applied in the order of the fields; `None`: no row wishes any."""

    bias: TokenLists | None = None
    """Added."""
    seen: TokenLists | None = None
    """Tokens of prompt or output, each with its row's repetition penalty: positive logits are divided, others
    multiplied (Keskar et al., CTRL, 2019)."""
    generated: TokenLists | None = None
    """Tokens of the output, each with what is taken off: times generated * frequency penalty + presence penalty."""
    banned: TokenLists | None = None
    """Never drawn, whatever their number."""
    allowed: torch.Tensor | None = None
    """[R, words] int32: bit t % 32 of word t // 32 says that a grammar allows token t. Tokens beyond the last word are
    not allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How each row's token is drawn: all tensors [R], on the device of the logits."""

    temperature: torch.Tensor
    """float64; 0: the most likely token, the lowest id among equals."""
    top_k: torch.Tensor
    """int64; 0: all."""
    top_p: torch.Tensor
    """float64."""
    min_p: torch.Tensor
    """float64."""
    seed: torch.Tensor
    """int64: the seed's low 64 bits."""
    stream: torch.Tensor
    """int64: which of the request's samples."""
    position: torch.Tensor
    """int64: of the token to draw, counted from the start of the prompt."""
