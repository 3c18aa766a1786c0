"""Causes of a prompt's computed tokens, as the gateway refines and sums them."""

from collections.abc import Iterable, Sequence

from kvferry.core.causes import ComputeCause, ComputedTokens


def refined(
    computed: Sequence[ComputedTokens], *, num_prompt: int, block_tokens: int, num_elsewhere: int
) -> tuple[ComputedTokens, ...]:
    """Split the tokens that a worker has not seen before by whether another worker had their blocks.

    The tokens that a worker has not seen are the last full blocks before the end of the prompt: a block after them can
    only be the last one.

    Args:
        computed: computed tokens by cause, from the worker.
        num_prompt: length of the prompt in tokens.
        block_tokens: tokens per block of the worker.
        num_elsewhere: number of the prompt's leading tokens that another worker had reported when the route was chosen.
    """
    end = max(0, num_prompt - 1) // block_tokens * block_tokens
    found: list[ComputedTokens] = []
    for one in computed:
        if one.cause is not ComputeCause.FIRST_SEEN:
            found.append(one)
            continue
        elsewhere = max(0, min(one.num_tokens, min(num_elsewhere, end) - (end - one.num_tokens)))
        parts = (ComputeCause.ON_ANOTHER_WORKER, elsewhere), (ComputeCause.FIRST_SEEN, one.num_tokens - elsewhere)
        found += [ComputedTokens(cause, count) for cause, count in parts if count]
    return tuple(found)


def summed(computed: Iterable[ComputedTokens]) -> tuple[ComputedTokens, ...]:
    """Add computed tokens of equal causes, in the order of their first occurrence; the first age of a cause counts."""
    totals: dict[ComputeCause, ComputedTokens] = {}
    for one in computed:
        earlier = totals.get(one.cause)
        if earlier is not None:
            one = ComputedTokens(one.cause, earlier.num_tokens + one.num_tokens, earlier.seconds or one.seconds)
        totals[one.cause] = one
    return tuple(totals.values())
