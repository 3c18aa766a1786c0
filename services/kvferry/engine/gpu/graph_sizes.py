"""For how many rows decode steps are captured, which of these a batch takes, and how much memory that is at most.

A captured step is launched for the number of rows that it was captured for, so a batch is filled up to the next one:

    sizes   1  2  4  8  16  24  32 .. most        batch of 11 -> 16, of which 5 rows are padding
"""

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.model.config import ModelConfig

_LARGEST = 512
"""Rows; more of them keep a GPU busy for longer than their launches take."""
_STEPS = ((8, 64, 8), (64, 256, 16), (256, _LARGEST + 1, 32))
"""First, end and step: an eighth of a batch or less is padding from 64 rows up, and never more than 31 rows."""
_TOKENS = (*range(16, 128, 16), *range(128, 257, 32))
_ROW_TOKENS = 1 << 22
"""Tokens of context that all rows of a captured step have together, each as many as the longest may have; 32 bytes
each of room for parts of attention with 32 heads of 128 values and partitions of 512."""
_PARTITION = 512
_FLOAT = 4


def sizes(most: int) -> tuple[int, ...]:
    """Rows of captured steps, ascending.

    Args:
        most: sequences that run at a time; the last size, unless it is too large to be worth it.
    """
    last = min(most, _LARGEST)
    even = {size for first, end, step in _STEPS for size in range(first, end, step)}
    return tuple(sorted({size for size in {1, 2, 4} | even if size < last} | {last}))


def token_sizes() -> tuple[int, ...]:
    """Rows of captured pieces of steps with prompts, ascending. A step of more rows computes for longer than it takes
    to launch: 256 rows of an 8B shape are some 4 * 10^12 operations."""
    return _TOKENS


def fit(rows: int, ready: Collection[int]) -> int | None:
    """The smallest captured size with room for so many rows; `None`: there is none."""
    return min((size for size in ready if size >= rows), default=None)


def most_tokens(size: int, max_model_tokens: int, pool_tokens: int) -> int:
    """How long a context a captured step takes; a longer one runs uncaptured.

    Args:
        size: rows.
        max_model_tokens: of any sequence.
        pool_tokens: that all pages hold.
    """
    return max(1, min(max_model_tokens, pool_tokens, _ROW_TOKENS // size))


@dataclass(frozen=True, slots=True)
class Memory:
    """What captured steps take beside weights and pages."""

    scratch_bytes: int
    """Of the largest size, as if a layer gave nothing back before its end; smaller sizes use the same memory."""
    static_bytes: int
    """Inputs and outputs that stay where they are."""

    @property
    def most_bytes(self) -> int:
        """Together."""
        return self.scratch_bytes + self.static_bytes


def memory(config: ModelConfig, captured: Collection[int], *, value_bytes: int, tokens: int, width: int) -> Memory:
    """An upper bound, before anything is captured.

    Args:
        config: the model's shape.
        captured: sizes.
        value_bytes: of an activation.
        tokens: `most_tokens` of the largest size.
        width: blocks of a table.
    """
    largest, heads, dim = max(captured), config.num_heads, config.head_dim
    qkv = (heads + 2 * config.num_kv_heads) * dim
    layer = 5 * config.hidden_size + qkv + heads * dim + 3 * config.intermediate_size
    parts = heads * (dim + 1) * -(-tokens // _PARTITION) * _FLOAT
    head = config.vocab_size * value_bytes
    scratch = largest * (layer * value_bytes + parts + head + 2 * dim * _FLOAT)
    tables = (largest + 1) * width * _FLOAT
    return Memory(scratch, tables + largest * config.vocab_size * _FLOAT + 64 * sum(captured))


def piece_bytes(config: ModelConfig, rows: Collection[int], *, value_bytes: int) -> int:
    """An upper bound for captured pieces of steps with so many rows: what each size keeps between its pieces, what all
    sizes share between pieces, and the scratch memory of a piece of the largest."""
    hidden, dim = config.hidden_size, config.head_dim
    kept = hidden * value_bytes + 2 * dim * _FLOAT + 3 * 8
    shared = 2 * (config.num_heads + config.num_kv_heads) * dim * value_bytes
    scratch = (5 * hidden + 3 * config.intermediate_size) * value_bytes + shared
    return sum(rows) * kept + max(rows) * (shared + scratch)
