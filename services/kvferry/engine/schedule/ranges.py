"""Ranges of an engine's numeric settings, checked whenever settings are created, not only on the command line."""

from kvferry.core.errors import UsageError, shortened
from kvferry.engine.schedule.step.adapter_slots import MAX_SLOTS
from kvferry.weights.adapters.adapter_config import MAX_RANK

RANGES: dict[str, tuple[int, int]] = {
    "threads": (0, 1024),
    "kv_bytes": (0, 1 << 50),
    "block_tokens": (1, 1024),
    "max_model_tokens": (0, 1 << 24),
    "stream_interval": (1, 1024),
    "adapter_slots": (0, MAX_SLOTS),
    "max_adapter_rank": (1, MAX_RANK),
    "adapter_bytes": (0, 1 << 50),
    "token_budget": (1, 1 << 20),
    "max_chunk_tokens": (1, 1 << 20),
    "max_mixed_tokens": (1, 1 << 20),
    "max_sequences": (1, 1 << 16),
    "max_scored_rows": (1, 1 << 20),
}
"""Smallest and largest value by field."""


def check_ranges(settings: object, *fields: str) -> None:
    """Check the whole numbers of settings.

    Raises:
        UsageError: a field is not a whole number in its range.
    """
    for field in fields:
        value = getattr(settings, field)
        low, high = RANGES[field]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UsageError(
                f"{field} must be a whole number from {low} to {high}, not {shortened(repr(value))}", field=field
            )


def check_share(field: str, value: object, *, may_be_zero: bool) -> None:
    """Check a share.

    Args:
        field: name of the setting, for error messages.
        value: its value.
        may_be_zero: whether 0 is valid.

    Raises:
        UsageError: the share is not a number from 0 (above 0, unless `may_be_zero`) to 1.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0 or not (may_be_zero or value):  # type: ignore[operator]
        bounds = "from 0 to 1" if may_be_zero else "above 0 and at most 1"
        raise UsageError(f"{field} must be {bounds}, not {shortened(repr(value))}", field=field)
