"""Batch sizes of graph capture: sizes to capture, selection of a size for a batch, and an upper bound on the memory.

A captured step always computes the number of rows that it was captured for, so a batch is padded to the next captured
batch size:

    sizes   1  2  4  8  16  24  32 .. limit       batch of 11 -> 16, of which 5 rows are padding
"""

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.weights.config import ModelConfig

_LARGEST = 512
"""Maximum captured batch size in rows; larger batches keep a GPU busy for longer than their launches take."""
_STEPS = ((8, 64, 8), (64, 256, 16), (256, _LARGEST + 1, 32))
"""Ranges (first, end, step) of batch sizes. From 64 rows on, padding is at most an eighth of a batch, and at most 31
rows."""
_TOKENS = (*range(16, 128, 16), *range(128, 257, 32))
_ROW_TOKENS = 1 << 22
"""Upper bound on rows x longest context of a captured step. Partial attention results take 32 bytes per token for 32
heads of 128 values and partitions of 512 tokens."""
_PARTITION = 512
_LATENT_PARTITION = 1024
_FLOAT = 4


def sizes(limit: int) -> tuple[int, ...]:
    """Return the batch sizes, in rows, at which decode steps are captured, ascending.

    Args:
        limit: maximum number of running sequences, which is the largest batch size unless it exceeds `_LARGEST`.
    """
    last = min(limit, _LARGEST)
    even = {size for first, end, step in _STEPS for size in range(first, end, step)}
    return tuple(sorted({size for size in {1, 2, 4} | even if size < last} | {last}))


def token_sizes() -> tuple[int, ...]:
    """Return the batch sizes, in rows, at which prefill steps are captured piecewise, ascending. Larger steps compute
    for longer than they take to launch: 256 rows of an 8B model are about 4 * 10^12 operations."""
    return _TOKENS


def fit(rows: int, ready: Collection[int]) -> int | None:
    """Return the smallest captured batch size of at least `rows` rows; `None` if all are smaller.

    Args:
        rows: number of rows of the step.
        ready: captured batch sizes in rows.
    """
    return min((size for size in ready if size >= rows), default=None)


def max_tokens(size: int, max_model_tokens: int, pool_tokens: int) -> int:
    """Return the maximum context length of a captured step, in tokens; steps with a longer context run eagerly.

    Args:
        size: captured batch size in rows.
        max_model_tokens: maximum tokens of a sequence.
        pool_tokens: capacity of all pages in tokens.
    """
    return max(1, min(max_model_tokens, pool_tokens, _ROW_TOKENS // size))


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Memory of captured steps in bytes, without weights and pages."""

    scratch_bytes: int
    """Scratch memory of the largest batch size, assuming that a layer frees nothing before its end; smaller sizes share
    it."""
    static_bytes: int
    """Memory of static inputs and outputs of all batch sizes."""

    @property
    def max_bytes(self) -> int:
        """Upper bound on the total memory, scratch and static."""
        return self.scratch_bytes + self.static_bytes


def memory(config: ModelConfig, captured: Collection[int], *, value_bytes: int, tokens: int, width: int) -> GraphMemory:
    """Compute an upper bound on the memory of captured decode steps, before any capture.

    Args:
        config: the model's shape.
        captured: captured batch sizes in rows.
        value_bytes: bytes per activation value.
        tokens: result of `max_tokens` for the largest batch size.
        width: blocks per block table.
    """
    largest, heads, dim = max(captured), config.num_heads, config.head_dim
    layer = 5 * config.hidden_size + config.projected_heads * dim + config.attended_size + config.inner_values
    parts = heads * (dim + 1) * -(-tokens // _PARTITION) * _FLOAT
    if config.latent is not None:
        rank = config.latent.rank
        layer += 2 * heads * rank + (config.latent.query_rank or 0) + config.latent.width
        parts = heads * (rank + 1) * -(-tokens // _LATENT_PARTITION) * _FLOAT
    head = config.vocab_size * value_bytes
    scratch = largest * (layer * value_bytes + parts + head + 2 * dim * _FLOAT)
    tables = (largest + 1) * width * _FLOAT
    return GraphMemory(scratch, tables + largest * config.vocab_size * _FLOAT + 64 * sum(captured))


def piece_bytes(config: ModelConfig, rows: Collection[int], *, value_bytes: int) -> int:
    """Compute an upper bound on the memory of piecewise captured steps in bytes: tensors that each batch size keeps
    between pieces, tensors shared by all batch sizes, and scratch memory of a piece of the largest batch size.

    Args:
        config: configuration of the model.
        rows: captured batch sizes in rows.
        value_bytes: bytes of one hidden value.
    """
    hidden, dim = config.hidden_size, config.head_dim
    kept = hidden * value_bytes + 2 * dim * _FLOAT + 3 * 8
    shared = (config.projected_heads * dim + config.attended_size) * value_bytes
    scratch = (5 * hidden + config.inner_values) * value_bytes + shared
    return sum(rows) * kept + max(rows) * (shared + scratch)
