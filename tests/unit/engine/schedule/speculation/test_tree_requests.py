"""Requests of every kind have the tokens and log-probabilities with trees that they have without speculation."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness.kernels.head_files import write_eagle, write_medusa

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.model import tiny

PROMPTS = [[*b"abcabcabc abc", 40 + i, *range(40, 40 + 5 * i)] for i in range(4)]
DRAWN = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
REQUESTS = {
    "greedy": replace(DRAWN, temperature=0.0),
    "penalties": replace(DRAWN, presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.3),
    "greedy with penalties": replace(DRAWN, temperature=0.0, frequency_penalty=0.8),
    "bias and bad words": replace(DRAWN, logit_bias={70: 4.0, 98: -3.0}, bad_word_token_ids=((97, 98), (99,))),
    "log-probabilities": replace(DRAWN, logprobs=3),
    "minimum of tokens": replace(DRAWN, ignore_eos=False, min_tokens=9),
    "stop tokens": replace(DRAWN, stop_token_ids=(70, 71, 72, 97)),
    "cuts": replace(DRAWN, top_k=20, top_p=0.8, min_p=0.01, typical_p=0.9),
    "constraint": replace(DRAWN, constraint=Constraint(ConstraintKind.REGEX, "(ab|a|b|c)+")),
}


def a_model(speculation: str, dtype: str) -> LLM:
    limits = SchedulerLimits(token_budget=128, max_chunk_tokens=16, max_num_seqs=4)
    return LLM("tiny", dtype=dtype, kv_memory=1 << 20, limits=limits, speculation=speculation)


@pytest.mark.parametrize("accept", ["exact", "rejection"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_each_request_is_the_same_with_trees(dtype: str, accept: str, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path, tiny.config(), heads=4)
    plain = a_model("off", dtype)
    llm = a_model(f"medusa={folder}?k=4&width=4&fixed=1&accept={accept}", dtype)
    for name, params in REQUESTS.items():
        if accept == "rejection" and not params.is_greedy and params.constraint is None:
            continue  # the rule draws other tokens
        steps: list[StepPlan] = []
        llm.runner.watch = steps.append
        expected, found = (one.generate(PROMPTS, params) for one in (plain, llm))
        assert [c.token_ids for c in found] == [c.token_ids for c in expected], name
        assert [c.logprobs for c in found] == [c.logprobs for c in expected], name
        has_trees = any(item.parents for plan in steps for item in plan.scheduled)
        assert has_trees == (params.constraint is None), name
        assert llm.engine.is_idle


def test_sampled_requests_keep_chains_under_the_rejection_rule(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path, tiny.config(), heads=4)
    llm = a_model(f"medusa={folder}?width=4&fixed=1&accept=rejection", "float32")
    steps: list[StepPlan] = []
    llm.runner.watch = steps.append
    llm.generate(PROMPTS, DRAWN)
    drafted = [item for plan in steps for item in plan.scheduled if item.num_drafts]
    assert drafted
    assert not any(item.parents for item in drafted)


@pytest.mark.parametrize("drafted", [2, 7])
def test_the_largest_width_and_depth_have_the_same_tokens(drafted: int, tmp_path: Path) -> None:
    """A head of few tokens has several probable candidates at each node, so that its trees are wide at all levels."""
    config = tiny.config()
    folder = write_eagle(tmp_path, config, is_fused=True, drafted=drafted)
    params = replace(DRAWN, max_tokens=60)
    expected = [c.token_ids for c in a_model("off", "float32").generate(PROMPTS, params)]
    llm = a_model(f"eagle={folder}?k=32&width=8&fixed=1", "float32")
    steps: list[StepPlan] = []
    llm.runner.watch = steps.append
    assert [c.token_ids for c in llm.generate(PROMPTS, params)] == expected
    assert max(item.num_drafts for plan in steps for item in plan.scheduled) == 32
    assert llm.engine.is_idle
