"""Runners on a device over pages of groups of layers: the tokens of whole pages, captured or not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from harness.fakes.small_engine import engine_for
from harness.fakes.tape import TapeGraphs
from harness.kernels.family_checkpoints import FEATURED

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
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
from kvferry.weights.config import ModelConfig

BLOCK, PLACES = 4, 4
LIMITS = SchedulerLimits(token_budget=64, max_chunk_tokens=8, max_num_seqs=PLACES, reserve_share=0.0)
PROMPTS = [[5], list(range(100, 141)), [257, *b"hello", 258], list(b"a prompt that is longer than a window of tokens")]
CONFIGS = {
    "two groups": replace(FEATURED["window, caps, norms around"], windows=(7, None)),
    "one group with a window": replace(tiny.config(), windows=(7, 7)),
}


def an_engine(runner: Runner) -> Engine:
    return engine_for(
        runner,
        num_blocks=runner.kv.num_blocks,
        block_tokens=BLOCK,
        max_model_tokens=96,
        vocab_size=259,
        eos_token_ids=(),
        limits=LIMITS,
        windows=runner.kv.layout.groups.windows,
    )


def served(engine: Engine, counts: Sequence[int]) -> dict[str, list[int]]:
    """Serve requests that arrive one after the other; return the tokens of each."""
    tokens: dict[str, list[int]] = {}
    waiting, steps = [*enumerate(PROMPTS)], 0
    while waiting or engine.has_work:
        if waiting and steps % 3 == 0:
            index, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=counts[index], ignore_eos=True)
            engine.add(EngineRequest(RequestId(str(index)), prompt, params))
        for update in engine.step().updates:
            tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        engine.check_integrity()
        steps += 1
    assert engine.is_idle
    return tokens


def pages(config: ModelConfig, blocks: int, device: str, *, releases: bool) -> PagedKv:
    layout = KvLayout.of(config, block_tokens=BLOCK, dtype="float32", releases_windows=releases)
    return PagedKv.allocate(layout, blocks, device)


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_whole_pages(device: torch.device, name: str, is_captured: bool) -> None:
    config = CONFIGS[name]
    plain = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels="torch")
    counts = (6, 9, 12, 5)
    expected = served(an_engine(Runner(plain, pages(config, 64, "cpu", releases=False))), counts)
    model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels="triton", device=str(device))
    assert isinstance(model, Transformer)
    graphs = (CudaGraphs(device) if device.type == "cuda" else TapeGraphs()) if is_captured else None
    kv = pages(config, 40, str(device), releases=True)
    kv.pages.fill_(torch.nan)
    runner = DeviceRunner(model, kv, device_ops_for(device, "triton"), max_sequences=PLACES, graphs=graphs)
    runner.capture_all()
    engine = an_engine(runner)
    assert served(engine, counts) == expected
    if is_captured and device.type == "cpu":
        assert graphs is not None
        assert graphs.replayed > 5  # type: ignore[union-attr]
