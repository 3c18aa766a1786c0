"""The check of a prompt's length against the context."""

from kvferry.core.errors import InvalidRequest


def check_length(count: int, context: int, *, has_output: bool) -> None:
    """Check that a prompt, with the tokens generated before, fits into the context.

    Args:
        count: number of tokens.
        context: number of tokens that the context holds.
        has_output: whether room for at least one more token is needed; a vector needs none.

    Raises:
        InvalidRequest: it does not fit.
    """
    if has_output and count >= context:
        raise InvalidRequest(
            f"the prompt has {count} tokens, the context holds {context}, and at least one must be left for the "
            "output; shorten the prompt",
            field="prompt",
            reason="PROMPT_TOO_LONG",
        )
    if count > context:
        raise InvalidRequest(
            f"the prompt has {count} tokens, and the context holds {context}; shorten the prompt",
            field="prompt",
            reason="PROMPT_TOO_LONG",
        )
