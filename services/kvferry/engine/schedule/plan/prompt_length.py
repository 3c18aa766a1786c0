"""Check of a prompt's length against the context length."""

from kvferry.core.errors import InvalidRequest


def check_length(count: int, context: int, *, has_output: bool) -> None:
    """Check that a prompt, with the tokens generated so far, fits into the context.

    Args:
        count: number of tokens.
        context: context length in tokens.
        has_output: whether there must be room for at least one more token; a vector needs none.

    Raises:
        InvalidRequest: the prompt does not fit.
    """
    if has_output and count >= context:
        raise InvalidRequest(
            f"the prompt has {count} tokens, but the context length is {context} and the output needs at least one "
            "token; shorten the prompt",
            field="prompt",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    if count > context:
        raise InvalidRequest(
            f"the prompt has {count} tokens, but the context length is {context}; shorten the prompt",
            field="prompt",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
