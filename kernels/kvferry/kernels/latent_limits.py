"""Limits of latent attention in the Triton backend, and its scratch memory; for checks that load no kernels."""

LATENT_LIMITS = 512, 128
"""Maximum number of values of a latent vector without its rotated part, and of the rotated part. More do not fit into
the registers of a program."""
_SCRATCH_BYTES = 256 << 20
"""Bytes of absorbed queries and latent results up to which all heads are computed together. The value was not tuned by
measurement."""
_MIN_HEADS = 32


def heads_at_once(rows: int, heads: int, *, rank: int, value_bytes: int) -> int:
    """Return how many heads of a step are computed together: a multiple of 32, or all.

    Args:
        rows: rows of the step.
        heads: query heads.
        rank: values of a latent vector.
        value_bytes: bytes per value.
    """
    of_head = max(1, 2 * rows * rank * value_bytes)
    return min(heads, max(1, _SCRATCH_BYTES // (of_head * _MIN_HEADS)) * _MIN_HEADS)


def scratch_bytes(rows: int, heads: int, *, rank: int, value_bytes: int) -> int:
    """Return the bytes of absorbed queries and latent results that a step needs at a time; see `heads_at_once`.

    Args:
        rows: rows of the step.
        heads: query heads.
        rank: values of a latent vector.
        value_bytes: bytes per value.
    """
    return 2 * rows * rank * value_bytes * heads_at_once(rows, heads, rank=rank, value_bytes=value_bytes)
