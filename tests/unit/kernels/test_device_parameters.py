"""Sampling parameters give the same tokens with the device's sampler as with the host's, in one batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.fakes.small_engine import engine_for
from harness.fakes.tape import TapeGraphs

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.execute.gpu.graphs import CudaGraphs
from kvferry.engine.execute.gpu.runner import DeviceRunner
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.transformer import Transformer
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.kernels.ops import device_ops_for
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

CONFIG = tiny.config()
LIMITS = SchedulerLimits(max_num_seqs=6, max_scored_rows=3, reserve_share=0.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(seed=4, max_tokens=6, ignore_eos=True)
COMPANY = {
    "greedy": GREEDY,
    "typical": replace(DRAWN, typical_p=0.5),
    "allowed": replace(DRAWN, allowed_token_ids=tuple(range(40, 90))),
    "bad words": replace(GREEDY, bad_word_token_ids=((0,), (1,), (2, 3))),
    "scored": replace(DRAWN, prompt_logprobs=2),
    "scored greedy": replace(GREEDY, prompt_logprobs=0, bad_word_token_ids=((9, 9),)),
}


def run(runner: Runner, requests: dict[str, SamplingParams]) -> dict[str, tuple[list[int], Any]]:
    engine = engine_for(
        runner,
        num_blocks=runner.kv.num_blocks,
        block_tokens=4,
        max_model_tokens=CONFIG.max_model_tokens,
        vocab_size=CONFIG.vocab_size,
        eos_token_ids=CONFIG.eos_token_ids,
        limits=LIMITS,
    )
    for name, sampling in requests.items():
        engine.add(EngineRequest(RequestId(name), list(name.encode()), sampling))
    made: dict[str, tuple[list[int], Any]] = {name: ([], None) for name in requests}
    while engine.has_work:
        for update in engine.step().updates:
            assert update.error is None
            tokens, scores = made[update.request_id]
            tokens += [token.token_id for token in update.tokens]
            made[update.request_id] = tokens, scores if update.scores is None else update.scores
    assert engine.is_idle
    return made


def model_on(device: torch.device, kernels: str) -> Transformer:
    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32", kernels=kernels, device=str(device))
    assert isinstance(model, Transformer)
    return model


def pages(model: Transformer) -> PagedKv:
    return PagedKv.allocate(KvLayout.of(CONFIG, block_tokens=4, dtype="float32"), 64, model.device)


@pytest.mark.parametrize("is_captured", [pytest.param(False, marks=pytest.mark.long), True], ids=["eager", "captured"])
def test_tokens_and_scores_are_the_hosts(device: torch.device, is_captured: bool) -> None:
    plain = model_on(torch.device("cpu"), "torch")
    expected = run(Runner(plain, pages(plain)), COMPANY)
    model = model_on(device, "triton")
    graphs = (CudaGraphs(device) if device.type == "cuda" else TapeGraphs()) if is_captured else None
    runner = DeviceRunner(
        model, pages(model), device_ops_for(device, "triton"), max_sequences=LIMITS.max_num_seqs, graphs=graphs
    )
    found = run(runner, COMPANY)
    assert {name: tokens for name, (tokens, _) in found.items()} == {name: t for name, (t, _) in expected.items()}
    for name, (_, scores) in expected.items():
        if COMPANY[name].prompt_logprobs is None:
            assert found[name][1] is None
            continue
        assert [(s.token_id, s.rank, [t for t, _ in s.top]) for s in found[name][1]] == [
            (s.token_id, s.rank, [t for t, _ in s.top]) for s in scores
        ]
        assert [s.logprob for s in found[name][1]] == pytest.approx([s.logprob for s in scores], abs=1e-3)
