"""Log-probabilities of a prompt's tokens, from the logits of the rows before them.

One row at a time is converted to float64, so that scratch memory for one row suffices; the scheduler bounds the number
of rows of a step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import KvferryError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import ScoredToken
from kvferry.engine.execute.models.model import Logits
from kvferry.engine.execute.run.sampler import log_norm, most_likely
from kvferry.engine.schedule.step.sampling_plan import not_finite
from kvferry.engine.schedule.step.step import ScheduledSequence

Scores = Mapping[RequestId, tuple[ScoredToken, ...] | KvferryError]
"""Scored tokens by request, in order of position; an error if a logit is not finite."""


def score(logits: Logits, scheduled: Sequence[ScheduledSequence]) -> Scores:
    """Score the prompt tokens of a step.

    Args:
        logits: logits of all scored and sampled rows of the step, in the order of `StepBatch.sample_rows`.
        scheduled: the plan's sequences.
    """
    scores: dict[RequestId, tuple[ScoredToken, ...] | KvferryError] = {}
    row = 0
    for s in scheduled:
        found: list[ScoredToken] = []
        for index, position in enumerate(s.scored_positions, start=row):
            if not logits.finite[index]:
                scores[s.request_id] = not_finite(s)
                break
            num_top = s.sampling.prompt_logprobs or 0
            found.append(_score_row(logits.values[index], s.token_ids[position + 1], num_top))
        else:
            if found:
                scores[s.request_id] = tuple(found)
        row += s.num_scored + s.num_sampled
    return scores


def _score_row(row: npt.NDArray[np.float32], token: int, num_top: int) -> ScoredToken:
    raw = row.astype(np.float64)
    norm = log_norm(raw)
    top = tuple((int(t), float(raw[t] - norm)) for t in most_likely(raw, num_top))
    own = raw[token]
    rank = 1 + int(np.count_nonzero(raw > own)) + int(np.count_nonzero(raw[:token] == own))
    return ScoredToken(token, float(own - norm), rank, top)
