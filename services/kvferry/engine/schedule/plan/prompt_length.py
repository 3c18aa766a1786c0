"""Check of a prompt's length against the context length."""

from kvferry.core.errors import context_overflow


def check_length(count: int, context: int, *, has_output: bool) -> None:
    """Check that a prompt, with the tokens generated so far, fits into the context.

    Args:
        count: number of tokens.
        context: context length in tokens.
        has_output: whether there must be room for at least one more token; a vector needs none.

    Raises:
        InvalidRequest: the prompt does not fit.
    """
    if count + has_output > context:
        raise context_overflow(count, context, has_output=has_output)
