"""The state of one condition of a pool's status."""

ConditionState = tuple[str, str, str]
"""Status, reason and message of a condition."""
