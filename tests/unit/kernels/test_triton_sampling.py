"""Tokens drawn by the Triton backend are those of the host's sampler, for all sampling parameters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import RequestId
from kvferry.core.philox import uniform
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.run import sampler
from kvferry.engine.schedule.step.step import ScheduledSequence
from kvferry.kernels.gpu.backend import DEVICE_OPS
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.gpu.sampling.bins import MAX_VOCABULARY
from kvferry.kernels.logit_rows import Adjustments, Draws, TokenLists
from kvferry.kernels.ops import DeviceOps
from kvferry.kernels.reference import forward as reference

PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.05, 0.5, 0.97]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        "seed": st.integers(-(1 << 63), (1 << 64) - 1),
    }
)


def draws(params: list[SamplingParams], positions: list[int], device: torch.device | str) -> Draws:
    def of(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

    low = [((p.seed or 0) + (1 << 63)) % (1 << 64) - (1 << 63) for p in params]
    return Draws(
        of("temperature", torch.float64),
        of("top_k", torch.int64),
        of("top_p", torch.float64),
        of("min_p", torch.float64),
        torch.tensor(low, device=device),
        torch.arange(len(params), device=device),
        torch.tensor(positions, device=device),
    )


def drawn_by_the_host(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    return [
        int(row.argmax())
        if p.is_greedy
        else sampler.draw(row.double().numpy(), p, uniform(p.seed or 0, index, positions[index]))
        for index, (row, p) in enumerate(zip(logits, params, strict=True))
    ]


@pytest.mark.long
def test_every_cut_counts(device: torch.device) -> None:
    """Each cut changes the drawn token of some rows, alone and together with the others."""
    cuts: list[dict[str, float]] = [{"top_k": 6}, {"top_p": 0.4}, {"min_p": 0.15}]
    parameter_sets = [*cuts, cuts[0] | cuts[1], cuts[0] | cuts[2], cuts[1] | cuts[2], cuts[0] | cuts[1] | cuts[2], {}]
    params = [SamplingParams(temperature=2.0, seed=i, **w) for i, w in enumerate(parameter_sets * 5)]  # type: ignore[arg-type]
    logits = torch.round(torch.randn(len(params), 50, generator=torch.Generator().manual_seed(4)) * 4) / 2
    positions = list(range(len(params)))
    expected = drawn_by_the_host(logits, params, positions)
    for cut in ("top_k", "top_p", "min_p"):
        without = [replace(p, **{cut: 1.0 if cut == "top_p" else 0}) for p in params]
        assert drawn_by_the_host(logits, without, positions) != expected
    assert DEVICE_OPS.sample(logits.to(device), draws(params, positions, device)).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(
    parameter_sets=st.lists(PARAMETERS, min_size=1, max_size=3),
    vocabulary=st.sampled_from([1, 2, 60, 300]),
    spread=st.sampled_from([3.0, 3.0, 300.0, 1e-3, 0.0]),  # below 0.01, all tokens are in one or two bins
    levels=st.sampled_from([0, 4]),
    seed=st.integers(0, 1000),
    position=st.integers(0, 5000),
)
def test_draws_are_the_sampler_s(
    device: torch.device,
    parameter_sets: list[dict[str, float]],
    vocabulary: int,
    spread: float,
    levels: int,
    seed: int,
    position: int,
) -> None:
    logits = torch.randn(len(parameter_sets), vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    if levels:
        logits = torch.round(logits * levels) / levels  # many equal logits
    if vocabulary > 2:
        logits[0, 1] = -torch.inf
    params = [SamplingParams(**w) for w in parameter_sets]  # type: ignore[arg-type]
    positions = [position + i for i in range(len(params))]
    expected = drawn_by_the_host(logits, params, positions)
    assert DEVICE_OPS.sample(logits.to(device), draws(params, positions, device)).tolist() == expected
    assert reference.DEVICE_OPS.sample(logits, draws(params, positions, "cpu")).tolist() == expected


def test_a_vocabulary_whose_sums_could_overflow_is_refused(device: torch.device) -> None:
    logits = torch.zeros(1, MAX_VOCABULARY + 1, device=device)
    with pytest.raises(BadKernelInput, match="a row has at most 524288 tokens, not 524289"):
        DEVICE_OPS.sample(logits, draws([SamplingParams()], [0], device))


def lists(rows: list[dict[int, float]], device: torch.device | str) -> TokenLists:
    starts = np.cumsum([0, *(len(r) for r in rows)])
    return TokenLists(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([t for r in rows for t in r], dtype=torch.int32, device=device),
        torch.tensor([v for r in rows for v in r.values()], dtype=torch.float64, device=device),
        max(len(r) for r in rows),
    )


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, 39), min_size=2, max_size=30), min_size=1, max_size=3),
    bias=st.dictionaries(st.integers(0, 39), st.floats(-5, 5), max_size=9),
    repetition=st.sampled_from([1.0, 0.8, 1.3]),
    presence=st.sampled_from([0.0, 0.7]),
    frequency=st.sampled_from([0.0, -0.3, 1.1]),
    banned=st.sets(st.integers(0, 39), max_size=5),
    seed=st.integers(0, 1000),
)
def test_adjusted_logits_are_the_sampler_s(
    device: torch.device,
    tokens: list[list[int]],
    bias: dict[int, float],
    repetition: float,
    presence: float,
    frequency: float,
    banned: set[int],
    seed: int,
) -> None:
    logits = torch.randn(len(tokens), 40, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    expected = [
        sampler.adjust(
            row.double().numpy(),
            ScheduledSequence(
                request_id=RequestId("r"),
                token_ids=own,
                num_prompt=1,
                num_computed=len(own) - 1,
                num_scheduled=1,
                block_ids=[],
                num_sampled=1,
                sampling=params,
                sample_index=0,
                banned_token_ids=tuple(banned),
            ),
        )
        for row, own in zip(logits, tokens, strict=True)
    ]

    def adjusted(ops: DeviceOps, at: torch.device | str) -> torch.Tensor:
        adjustments = Adjustments(
            lists([bias for _ in tokens], at),
            lists([dict.fromkeys(own, repetition) for own in tokens], at),
            lists([{t: frequency * own[1:].count(t) + presence for t in own[1:]} for own in tokens], at),
            lists([dict.fromkeys(banned, 0.0) for _ in tokens], at),
        )
        return ops.adjust_logits(logits.to(at), adjustments)

    for got in (adjusted(DEVICE_OPS, device), adjusted(reference.DEVICE_OPS, "cpu")):
        np.testing.assert_allclose(got.cpu().numpy(), np.stack(expected), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("vocabulary", [5, 64, 100])
def test_a_grammar_allows_its_bits_and_nothing_beyond_its_words(device: torch.device, vocabulary: int) -> None:
    allowed = torch.tensor([[0b10110, 1], [-1, -1], [0, 0]], dtype=torch.int32)
    adjustments = Adjustments(allowed=allowed.to(device))
    got = DEVICE_OPS.adjust_logits(torch.zeros(3, vocabulary, device=device), adjustments)
    kept = [(row == 0).nonzero().flatten().tolist() for row in got.cpu()]
    assert kept == [[t for t in (1, 2, 4, 32) if t < vocabulary], list(range(min(vocabulary, 64))), []]
    expected = reference.DEVICE_OPS.adjust_logits(torch.zeros(3, vocabulary), Adjustments(allowed=allowed))
    assert torch.equal(got.cpu(), expected)


def test_default_parameters_change_nothing(device: torch.device) -> None:
    logits = torch.randn(2, 7).to(device)
    assert torch.equal(DEVICE_OPS.adjust_logits(logits, Adjustments()), logits.double())


@settings(max_examples=15, deadline=None)
@given(rows=st.sampled_from([0, 1, 3]), vocabulary=st.sampled_from([1, 127, 300]), scale=st.sampled_from([1.0, 50.0]))
def test_log_probabilities(device: torch.device, rows: int, vocabulary: int, scale: float) -> None:
    logits, tokens = torch.randn(rows, vocabulary) * scale, torch.randint(0, vocabulary, (rows,))
    got = DEVICE_OPS.log_probabilities(logits.to(device), tokens.to(device))
    expected = reference.DEVICE_OPS.log_probabilities(logits, tokens)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-13, atol=1e-13)
