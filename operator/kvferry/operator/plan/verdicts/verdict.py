"""The verdict of a condition."""

Verdict = tuple[str, str, str]
"""Status, reason and message of a condition."""
