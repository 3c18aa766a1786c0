"""Converts the computed tokens of a prompt, by cause, to and from `kvferry.v1` messages."""

import math
from collections.abc import Iterable, Mapping

from kvferry.core.causes import ComputeCause, ComputedTokens
from kvferry.v1 import common_pb2

_CAUSES: Mapping[int, ComputeCause] = {
    common_pb2.ComputedTokens.CAUSE_FIRST_SEEN: ComputeCause.FIRST_SEEN,
    common_pb2.ComputedTokens.CAUSE_EVICTED: ComputeCause.EVICTED,
    common_pb2.ComputedTokens.CAUSE_DROPPED: ComputeCause.DROPPED,
    common_pb2.ComputedTokens.CAUSE_PARTIAL_BLOCK: ComputeCause.PARTIAL_BLOCK,
    common_pb2.ComputedTokens.CAUSE_ROWS_REQUESTED: ComputeCause.ROWS_REQUESTED,
    common_pb2.ComputedTokens.CAUSE_LOAD_FAILED: ComputeCause.LOAD_FAILED,
    common_pb2.ComputedTokens.CAUSE_LOAD_DEARER: ComputeCause.LOAD_DEARER,
    common_pb2.ComputedTokens.CAUSE_RESUMED: ComputeCause.RESUMED,
    common_pb2.ComputedTokens.CAUSE_PREEMPTED: ComputeCause.PREEMPTED,
}
_NUMBERS = {cause: number for number, cause in _CAUSES.items()}


def computed_to_wire(computed: Iterable[ComputedTokens]) -> list[common_pb2.ComputedTokens]:
    """Convert a worker's computed tokens to messages."""
    return [
        common_pb2.ComputedTokens(
            cause=_NUMBERS[one.cause],  # type: ignore[arg-type]  # a number of the enum
            num_tokens=one.num_tokens,
            seconds=one.seconds,
        )
        for one in computed
    ]


def computed_from_wire(messages: Iterable[common_pb2.ComputedTokens]) -> tuple[ComputedTokens, ...]:
    """Convert messages to computed tokens. Causes that this version does not know become `FIRST_SEEN`, so that the
    number of tokens stays right; an age that is no time becomes 0."""
    return tuple(
        ComputedTokens(
            _CAUSES.get(one.cause, ComputeCause.FIRST_SEEN),
            one.num_tokens,
            one.seconds if 0.0 <= one.seconds < math.inf else 0.0,
        )
        for one in messages
    )
