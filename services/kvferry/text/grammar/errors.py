"""The error for a constraint that is invalid or cannot be enforced."""

from kvferry.core.errors import InvalidRequest


def invalid(message: str) -> InvalidRequest:
    """Return the error for a constraint."""
    return InvalidRequest(message, field="constraint", reason="CONSTRAINT_INVALID")
