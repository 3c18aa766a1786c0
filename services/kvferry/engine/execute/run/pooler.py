"""Sums of hidden states over the pooled rows of each sequence, in float64."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import GenerationFailed, KvferryError
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.step.prompt_pooling import Sums
from kvferry.engine.schedule.step.step import ScheduledSequence, StepResult


def pool(hidden: npt.NDArray[np.float32], scheduled: Sequence[ScheduledSequence]) -> dict[RequestId, Sums]:
    """Sum the hidden states of each sequence's pooled rows; a non-finite sum means that a row is not finite.

    Args:
        hidden: [H, hidden] hidden states of all pooled rows of the step, in the order of `StepBatch.hidden_rows`.
        scheduled: the plan's sequences.
    """
    sums: dict[RequestId, Sums] = {}
    row = 0
    for s in scheduled:
        if s.pooled_positions:
            end = row + len(s.pooled_positions)
            sums[s.request_id] = hidden[row:end].sum(axis=0, dtype=np.float64)
            row = end
    return sums


def with_pooled(result: StepResult, hidden: npt.NDArray[np.float32], plan: Sequence[ScheduledSequence]) -> StepResult:
    """Add the pooled rows of a step to its result. A sequence whose hidden states are not finite fails.

    Args:
        result: result of the step.
        hidden: [H, hidden] hidden states of all pooled rows of the step, in the order of `StepBatch.hidden_rows`.
        plan: the step's sequences.
    """
    sums: dict[RequestId, Sums] = {}
    failures: dict[RequestId, KvferryError] = dict(result.failures)
    for request_id, total in pool(hidden, plan).items():
        if np.isfinite(total).all():
            sums[request_id] = total
        else:
            failures[request_id] = _not_finite(request_id)
    return replace(result, pooled=sums, failures=failures)


def _not_finite(request_id: RequestId) -> GenerationFailed:
    return GenerationFailed(
        f"request {request_id}: a hidden state of the prompt is not finite; the weights or the pages are damaged"
    )
