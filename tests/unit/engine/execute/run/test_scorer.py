"""Scores are log-probabilities of the model's distribution; a failed row fails its own sequence."""

import math
from dataclasses import replace

import pytest
import torch

from kvferry.core.errors import GenerationFailed
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.models.transformer import logits_of
from kvferry.engine.execute.run.scorer import score
from kvferry.engine.schedule.step.step import ScheduledSequence, sampled_rows

PROMPT = ScheduledSequence(
    request_id=RequestId("a"),
    token_ids=[3, 1, 4, 1, 5],
    num_prompt=5,
    num_computed=1,
    num_scheduled=4,
    block_ids=[],
    num_sampled=1,
    sampling=SamplingParams(temperature=0, prompt_logprobs=2),
    sample_index=0,
    num_scored=3,
)
OTHER = replace(PROMPT, request_id=RequestId("b"), num_scored=0, sampling=SamplingParams(temperature=0))
LAST = replace(PROMPT, request_id=RequestId("c"), num_computed=2, num_scheduled=1, num_sampled=0, num_scored=1)
STEP = (PROMPT, OTHER, LAST)


def test_scores_are_log_softmax_with_rank_and_alternatives() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(5)) * 3
    logits[0, 4] = logits[0, 2]  # equal to the logit of a lower id
    scores = score(logits_of(logits), STEP)
    assert scores.keys() == {"a", "c"}
    for request, rows in (("a", [(0, 4), (1, 1), (2, 5)]), ("c", [(5, 1)])):
        found = scores[RequestId(request)]
        assert isinstance(found, tuple)
        for item, (row, token) in zip(found, rows, strict=True):
            shares = torch.log_softmax(logits[row].double(), 0)
            order = shares.sort(descending=True, stable=True).indices.tolist()
            assert item.token_id == token
            assert item.logprob == pytest.approx(float(shares[token]), abs=1e-12)
            assert item.rank == order.index(token) + 1
            assert [t for t, _ in item.top] == order[:2]
            assert [value for _, value in item.top] == pytest.approx(shares[order[:2]].tolist(), abs=1e-12)
    assert sampled_rows(STEP) == [3, 4]


def test_a_row_that_is_not_finite_fails_its_own_prompt() -> None:
    logits = torch.zeros(6, 50)
    logits[1, 7] = math.nan
    scores = score(logits_of(logits), STEP)
    assert isinstance(scores[RequestId("a")], GenerationFailed)
    assert isinstance(scores[RequestId("c")], tuple)
