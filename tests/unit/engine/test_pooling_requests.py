"""Pooled vectors equal those from transformers' hidden states, alone and in any batch, in chunks, after preemption."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.fakes.engines import a_request, attach, small_limits
from harness.fakes.small_engine import engine_for
from harness.fakes.tape import TapeGraphs
from harness.idle import assert_idle
from harness.kernels.transformers_twin import twin_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import GenerationFailed, InvalidRequest
from kvferry.core.ids import RequestId
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.core.sampling import FinishReason
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
from kvferry.engine.execute.gpu.runner import DeviceRunner
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.transformer import Transformer
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.run.threaded_runner import ThreadedRunner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kernels.ops import device_ops_for
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

CONFIG = tiny.config()
CONTEXT = 64
PROMPTS = [[5], list(range(100, 117)), [257, *b"user\nhello", 258], list(b"a longer prompt " * 3), [9] * CONTEXT]
RAW = PoolingParams(normalize=False)


def states(prompt: Sequence[int]) -> np.ndarray:
    """Return the hidden states after the final norm of transformers' model, [tokens, hidden] float64."""
    with torch.inference_mode():
        found: torch.Tensor = TWIN.model(torch.tensor([list(prompt)])).last_hidden_state[0]
    return found.numpy().astype(np.float64)


TWIN = twin_of(CONFIG, tiny.TinyTensors(CONFIG))


def expected(prompt: Sequence[int], pooling: Pooling) -> np.ndarray:
    rows = states(prompt)
    return {Pooling.LAST: rows[-1], Pooling.MEAN: rows.mean(axis=0), Pooling.CLS: rows[0]}[pooling]


def runner_for(kernels: str, blocks: int = 96) -> Runner:
    backend = "auto" if kernels == "threaded" else kernels
    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32", kernels=backend)
    pages = PagedKv.allocate(KvLayout.of(CONFIG, block_tokens=4, dtype="float32"), blocks)
    if kernels == "threaded":
        return ThreadedRunner(model, pages)
    if kernels != "triton":
        return Runner(model, pages)
    assert isinstance(model, Transformer)
    ops = device_ops_for(torch.device("cpu"), kernels)
    return DeviceRunner(model, pages, ops, max_sequences=8, graphs=TapeGraphs(), piece_rows=(8, 16))


def engine_on(runner: Runner, limits: SchedulerLimits | None = None, blocks: int | None = None) -> Engine:
    return engine_for(
        runner,
        num_blocks=blocks or runner.kv.num_blocks,
        block_tokens=4,
        max_model_tokens=CONTEXT,
        vocab_size=CONFIG.vocab_size,
        eos_token_ids=(),
        limits=limits or small_limits(),
    )


COMPILED = runner_for("auto")


def ask(engine: Engine, name: str, prompt: list[int], params: PoolingParams) -> None:
    engine.add(EngineRequest.for_vector(RequestId(name), prompt, params))


def run(engine: Engine) -> dict[str, np.ndarray]:
    """Step until the engine is idle; return the vectors by request."""
    found: dict[str, np.ndarray] = {}
    for _ in range(2000):
        if not engine.has_work:
            assert_idle(engine)
            return found
        for update in engine.step().updates:
            assert update.error is None
            if update.embedding is not None:
                assert update.tokens == ()
                assert update.finish_reason is FinishReason.STOP
                assert update.request_id not in found
                found[update.request_id] = update.embedding
        engine.check_integrity()
    raise AssertionError("not idle")


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kernels", ["auto", "threaded", "torch", "reference", "triton"])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_those_of_transformers_beside_generating_sequences(kernels: str, pooling: Pooling) -> None:
    runner = COMPILED if kernels == "auto" else runner_for(kernels)
    engine = engine_on(runner, small_limits(max_chunk_tokens=7))
    prompts = PROMPTS if kernels != "triton" else PROMPTS[:3]  # the Triton interpreter is slow
    engine.add(a_request("generating", [3, 1, 4, 1, 5], max_tokens=3))
    for i, prompt in enumerate(prompts):
        ask(engine, str(i), prompt, replace(RAW, pooling=pooling))
    engine.add(a_request("also generating", [3, 1, 4], max_tokens=3))
    found = run(engine)
    assert len(found) == len(prompts)
    for i, prompt in enumerate(prompts):
        near(found[str(i)], expected(prompt, pooling))


@settings(max_examples=25, deadline=None)
@given(
    chosen=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(Pooling))), min_size=1, max_size=6),
    chunk=st.integers(1, 20),
    budget=st.integers(20, 64),
)
def test_chunks_and_batch_mates_change_nothing(chosen: list[tuple[int, Pooling]], chunk: int, budget: int) -> None:
    engine = engine_on(COMPILED, small_limits(max_chunk_tokens=chunk, token_budget=budget))
    for i, (prompt, pooling) in enumerate(chosen):
        ask(engine, str(i), PROMPTS[prompt], replace(RAW, pooling=pooling))
    found = run(engine)
    for i, (prompt, pooling) in enumerate(chosen):
        alone = engine_on(COMPILED)
        ask(alone, "alone", PROMPTS[prompt], replace(RAW, pooling=pooling))
        np.testing.assert_allclose(found[str(i)], run(alone)["alone"], rtol=1e-5, atol=1e-6)


def test_preempted_prompts_give_the_same_vectors() -> None:
    # The older sequences take pages while the long prompt is computed in chunks.
    engine = engine_on(COMPILED, small_limits(max_chunk_tokens=4), blocks=16)
    for name in ("older", "old"):
        engine.add(a_request(name, [1, 2, 3], max_tokens=24))
    engine.step()
    for pooling in Pooling:
        ask(engine, pooling, PROMPTS[3][:40], replace(RAW, pooling=pooling))
    found = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for pooling in Pooling:
        near(found[pooling], expected(PROMPTS[3][:40], pooling))


@pytest.mark.parametrize("pooling", list(Pooling))
def test_cached_rows_are_used_only_where_they_are_not_pooled(pooling: Pooling) -> None:
    engine, plans = engine_on(COMPILED), []
    COMPILED.watch = plans.append
    try:
        for name in ("first", "again"):
            plans.clear()
            ask(engine, name, PROMPTS[3], replace(RAW, pooling=pooling))
            near(run(engine)[name], expected(PROMPTS[3], pooling))
        assert plans[0].scheduled[0].num_computed == (44 if pooling is Pooling.LAST else 0)
    finally:
        COMPILED.watch = None


def test_kv_of_peers_is_not_loaded_for_rows_that_are_pooled() -> None:
    class NoLoader:
        def start(self, *_: object) -> None:
            raise AssertionError("a load was started")

        def cancel(self, _: object) -> None:
            pass

    engine = engine_on(COMPILED)
    attach(engine, loader=NoLoader())  # type: ignore[arg-type]
    request = EngineRequest.for_vector(RequestId("a"), PROMPTS[3], replace(RAW, pooling=Pooling.MEAN))
    engine.add(replace(request, remote=RemoteKv(40, object())))
    near(run(engine)["a"], expected(PROMPTS[3], Pooling.MEAN))


def test_a_hidden_state_that_is_not_finite_fails_its_own_request() -> None:
    engine = engine_on(COMPILED)
    ask(engine, "good", PROMPTS[0], RAW)
    ask(engine, "bad", PROMPTS[1], RAW)
    engine.step()
    engine = engine_on(COMPILED, small_limits(max_chunk_tokens=8))
    ask(engine, "bad", PROMPTS[1], replace(RAW, pooling=Pooling.MEAN))
    ask(engine, "good", PROMPTS[2], RAW)
    engine.step()
    page = engine.scheduler._admitted.running[0].kv.table.blocks[0]
    COMPILED.kv.pages[page].fill_(torch.nan)
    failed: list[str] = []
    while engine.has_work:
        failed += [u.request_id for u in engine.step().updates if isinstance(u.error, GenerationFailed)]
    COMPILED.kv.pages.zero_()
    assert failed == ["bad"]
    assert_idle(engine)


def test_a_prompt_may_fill_the_context_and_not_more() -> None:
    engine = engine_on(COMPILED)
    with pytest.raises(InvalidRequest, match=r"65 tokens > 64 maximum"):
        ask(engine, "long", [1] * (CONTEXT + 1), RAW)
    with pytest.raises(InvalidRequest, match="empty"):
        ask(engine, "none", [], RAW)
    ask(engine, "full", PROMPTS[4], RAW)
    near(run(engine)["full"], expected(PROMPTS[4], Pooling.LAST))


def test_an_aborted_request_leaves_no_state() -> None:
    engine = engine_on(COMPILED, small_limits(max_chunk_tokens=4))
    ask(engine, "a", PROMPTS[3], RAW)
    engine.step()
    assert engine.abort(RequestId("a"))
    assert run(engine) == {}
