"""Converts hints about the cache and retentions to and from `kvferry.v1` messages."""

import math
from collections.abc import Mapping

from kvferry.core.errors import InvalidRequest
from kvferry.core.limits import MAX_AFFINITY_KEY_CHARS
from kvferry.core.retention import CacheHints, Retention, RetentionOutcome
from kvferry.v1 import common_pb2


def check_retain_seconds(value: float) -> float:
    """Check the time for which a request's prompt is kept in the cache.

    Raises:
        InvalidRequest: the time is negative or not a number.
    """
    if not 0 <= value < math.inf:
        raise InvalidRequest(
            f"retain_seconds must be a time in seconds, or 0 for no retention, not {value}", field="retain_seconds"
        )
    return value


def hints_from_wire(retain_seconds: float, affinity_key: str) -> CacheHints:
    """Return the hints of a request.

    Raises:
        InvalidRequest: the time is not valid, or the key is too long.
    """
    if len(affinity_key) > MAX_AFFINITY_KEY_CHARS:
        raise InvalidRequest(
            f"affinity_key has {len(affinity_key)} characters; at most {MAX_AFFINITY_KEY_CHARS} are accepted",
            field="affinity_key",
        )
    return CacheHints(check_retain_seconds(retain_seconds), affinity_key)


_RETENTION_OUTCOMES: Mapping[int, RetentionOutcome] = {
    common_pb2.Retention.OUTCOME_RETAINED: RetentionOutcome.RETAINED,
    common_pb2.Retention.OUTCOME_QUOTA: RetentionOutcome.QUOTA,
    common_pb2.Retention.OUTCOME_OFF: RetentionOutcome.OFF,
    common_pb2.Retention.OUTCOME_SHORT: RetentionOutcome.SHORT,
    common_pb2.Retention.OUTCOME_EVICTED: RetentionOutcome.EVICTED,
    common_pb2.Retention.OUTCOME_DRAINING: RetentionOutcome.DRAINING,
}
_RETENTION_NUMBERS = {outcome: number for number, outcome in _RETENTION_OUTCOMES.items()}


def retention_to_wire(retention: Retention) -> common_pb2.Retention:
    """Convert the result of a retention to a message."""
    return common_pb2.Retention(
        outcome=_RETENTION_NUMBERS[retention.outcome],  # type: ignore[arg-type]  # a number of the enum
        num_tokens=retention.num_tokens,
        seconds=retention.seconds,
        expires_at=retention.expires_at,
    )


def retention_from_wire(message: common_pb2.Retention) -> Retention | None:
    """Convert the result of a retention; an outcome that this version does not support becomes `None`."""
    outcome = _RETENTION_OUTCOMES.get(message.outcome)
    if outcome is None:
        return None
    return Retention(outcome, message.num_tokens, message.seconds, message.expires_at)
