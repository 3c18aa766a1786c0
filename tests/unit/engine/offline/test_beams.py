"""Beam search: against transformers on the same weights, against an exhaustive search, and each rule separately."""

import itertools
from typing import Any

import pytest
import torch
from harness.kernels.transformers_twin import twin_of
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import FinishReason
from kvferry.engine import LLM, BeamParams
from kvferry.engine.offline.run import run
from kvferry.model import tiny
from kvferry.serving import beam_search
from kvferry.text.requests.beams import Beam, Beams

PROMPTS = [[*b"a tale of two cities"], [*b"abc"], [*b"the quick brown fox jumps over"], [7]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


@pytest.fixture(scope="module")
def reference() -> Any:
    config = tiny.config()
    return twin_of(config, tiny.TinyTensors(config))


def search(llm: LLM, params: BeamParams, eos_token_ids: tuple[int, ...]) -> list[list[Beam]]:
    """Return the outputs of all prompts, with these end tokens instead of the model's."""

    async def found(prompt: list[int]) -> list[Beam]:
        request = llm._requests.search(prompt, params)
        try:
            return (await beam_search.search(llm._source, request, params, eos_token_ids)).beams
        finally:
            llm._source.drain()

    return [run(found(prompt)) for prompt in PROMPTS]


def common_tokens(llm: LLM, params: BeamParams) -> tuple[int, ...]:
    """Return tokens that appear in outputs, to serve as end tokens."""
    outputs = search(llm, params, ())
    return tuple(sorted({own[0].tokens[len(own[0].tokens) // 2] for own in outputs}))[:1]


@pytest.mark.parametrize(
    ("width", "penalty", "early"),
    [
        (1, 1.0, False),
        (2, 0.0, True),
        (4, 1.0, False),
        (4, 2.0, True),
        (8, -1.0, False),
        (2, 2.0, "never"),
        (4, 1.0, "never"),
        (2, -1.0, "never"),
    ],
)
def test_outputs_and_scores_are_those_of_transformers(
    llm: LLM, reference: Any, width: int, penalty: float, early: Any
) -> None:
    params = BeamParams(width, max_tokens=8, length_penalty=penalty, early_stopping=early)
    for ends in ((), common_tokens(llm, params)):
        ours = search(llm, params, ends)
        for prompt, own in zip(PROMPTS[:2], ours, strict=False):
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=8,
                length_penalty=penalty,
                early_stopping=early,
                do_sample=False,
                eos_token_id=list(ends) or None,
                pad_token_id=258,
                return_dict_in_generate=True,
                output_scores=True,
            )
            found = [tuple(row[len(prompt) :].tolist()) for row in theirs.sequences]
            cut = [row[: len(beam.tokens)] for row, beam in zip(found, own, strict=True)]
            assert [beam.tokens for beam in own] == cut
            assert all(set(row[len(beam.tokens) :]) <= {258} for row, beam in zip(found, own, strict=True))
            if width > 1:  # with one beam, transformers decodes greedily and returns no scores
                scores = [beam.score(penalty) for beam in own]
                assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
    assert llm.engine.is_idle


def test_one_beam_is_greedy_decoding(llm: LLM) -> None:
    from kvferry.engine import SamplingParams

    (best,) = llm.beam_search([PROMPTS[0]], BeamParams(1, max_tokens=16, ignore_eos=True))
    (greedy,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert best[0].token_ids == greedy.token_ids
    assert best[0].text == greedy.text
    assert best[0].finish_reason is FinishReason.LENGTH
    assert best[0].score == pytest.approx(best[0].cumulative_logprob / 16)


def test_an_output_ends_with_the_context(llm: LLM) -> None:
    length = llm.engine.max_model_tokens - 2
    (own,) = llm.beam_search([[5] * length], BeamParams(2, max_tokens=10, ignore_eos=True))
    assert {len(output.token_ids) for output in own} == {2}


@pytest.mark.parametrize("prompt", [[], [5] * 5000, [100_000]])
def test_an_invalid_prompt_leaves_an_idle_engine(llm: LLM, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        llm.beam_search([PROMPTS[0], prompt], BeamParams(2, max_tokens=4))
    assert llm.engine.is_idle


def test_more_beams_than_an_engine_queues_are_searched_in_groups(llm: LLM) -> None:
    many = [[i % 250, i // 250] for i in range(140)]
    found = llm.beam_search(many, BeamParams(4, max_tokens=1, ignore_eos=True))
    assert len(found) == 140
    assert found[17] == llm.beam_search([many[17]], BeamParams(4, max_tokens=1, ignore_eos=True))[0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"width": 0}, "width"),
        ({"width": 9}, "width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"width": True}, "width"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"early_stopping": "always"}, "early_stopping"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamParams(**changes)
    assert caught.value.field == field


@given(st.lists(st.lists(st.floats(-5, -0.1), min_size=3, max_size=3), min_size=13, max_size=13), st.integers(1, 3))
def test_a_wide_search_finds_the_most_probable_output(rows: list[list[float]], depth: int) -> None:
    """With as many beams as partial outputs no beam is pruned, so the search finds the most probable of all outputs."""

    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        return rows[sum((token + 1) * 3**i for i, token in enumerate(tokens)) % len(rows)]

    def total(tokens: tuple[int, ...]) -> float:
        return sum(logprobs(tokens[:i])[token] for i, token in enumerate(tokens))

    params = BeamParams(8, max_tokens=min(depth, 2), ignore_eos=True)
    beams = Beams(params, frozenset())
    while not beams.is_done:
        beams.advance([sorted(enumerate(logprobs(b.tokens)), key=lambda pair: -pair[1]) for b in beams.live])
    best = max(itertools.product(range(3), repeat=params.max_tokens), key=total)
    assert beams.best(1)[0].logprob == pytest.approx(total(best))
    assert beams.ended == sorted(beams.ended, key=lambda beam: -beam.logprob)


def test_an_end_token_of_low_rank_ends_nothing() -> None:
    beams = Beams(BeamParams(1, max_tokens=4), frozenset({9}))
    beams.advance([[(1, -0.1), (9, -2.0)]])
    assert (beams.live, beams.ended) == ([Beam((1,), -0.1)], [])
    beams.advance([[(9, -0.1), (2, -0.2)]])
    assert beams.is_done
    assert beams.best(1) == [Beam((1, 9), pytest.approx(-0.2), FinishReason.STOP)]
