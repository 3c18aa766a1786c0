"""Weights of priorities for the `weighted` policy."""

from collections.abc import Mapping

from kvferry.core.errors import UsageError, shortened
from kvferry.core.sampling import MAX_PRIORITY

MAX_CLASSES = 64
MAX_WEIGHT = 1000

Weights = Mapping[int, int]
"""Weight by priority number; other priorities have weight 1."""


def read_weights(spec: str) -> Weights:
    """Parse `PRIORITY=WEIGHT,...`, such as `0=4,1=2`.

    Args:
        spec: empty for equal weights.

    Raises:
        UsageError: an entry is not a pair of whole numbers, a number is out of range, a priority appears twice,
            or there are more than 64 entries.
    """
    weights: dict[int, int] = {}
    entries = spec.split(",") if spec else []
    if len(entries) > MAX_CLASSES:
        raise UsageError(
            f"class_weights has {len(entries)} entries; at most {MAX_CLASSES} are accepted", field="class_weights"
        )
    for entry in entries:
        priority, _, weight = entry.strip().partition("=")
        if not (priority.removeprefix("-").isdecimal() and weight.isdecimal() and len(entry) <= 24):
            raise UsageError(
                f"class_weights entries must be PRIORITY=WEIGHT, such as 0=4, not {shortened(entry)!r}",
                field="class_weights",
            )
        if abs(int(priority)) > MAX_PRIORITY:
            raise UsageError(
                f"class_weights: a priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}",
                field="class_weights",
            )
        if not 1 <= int(weight) <= MAX_WEIGHT:
            raise UsageError(
                f"class_weights: the weight of priority {priority} must be between 1 and {MAX_WEIGHT}, not {weight}",
                field="class_weights",
            )
        if int(priority) in weights:
            raise UsageError(
                f"class_weights has priority {priority} twice; set each priority once", field="class_weights"
            )
        weights[int(priority)] = int(weight)
    return weights


def weights_in_use(scheduling: str, spec: str) -> Weights | None:
    """Return the weights with the policy `weighted`; `None` with another policy.

    Raises:
        UsageError: see `read_weights`; or there are weights with another policy.
    """
    weights = read_weights(spec)
    if scheduling == "weighted":
        return weights
    if weights:
        raise UsageError(
            f"class_weights has no effect with scheduling={scheduling}; use scheduling=weighted", field="class_weights"
        )
    return None


def checked_weights(spec: str) -> str:
    """Return `spec` if `read_weights` accepts it.

    Raises:
        UsageError: see `read_weights`.
    """
    read_weights(spec)
    return spec
