"""Captured and padded steps that sample on the device give the tokens of plain steps, without reads by the host."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness.fakes.small_engine import engine_for
from harness.fakes.stepping import Generation, generate, step
from harness.fakes.tape import Asked, NothingAsked, TapeGraphs
from harness.kernels.lora_files import write

from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.engine import Engine
from kvferry.engine.execute.build_runner import build_runner
from kvferry.engine.execute.gpu.graphs import CudaGraphs, Graphs, Launch
from kvferry.engine.execute.gpu.runner import DeviceRunner, LaunchedGpuStep
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.transformer import Transformer
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.offline.llm import LLM
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step import graph_sizes
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan
from kvferry.kernels.ops import device_ops_for
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.adapters.adapter_folder import read_adapter
from kvferry.weights.config import ModelConfig

CONFIG = tiny.config()
PROMPTS = [[5], list(range(100, 111)), [257, *b"hello", 258], list(b"a prompt that is longer ")]
PLACES = 5
LIMITS = SchedulerLimits(token_budget=64, max_chunk_tokens=16, max_num_seqs=PLACES, reserve_share=0.0)


@contextmanager
def nothing_asked(device: torch.device) -> Iterator[None]:
    """Raise an error for each synchronization with the device within the `with` block."""
    if device.type != "cuda":
        with NothingAsked():
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Quiet(DeviceRunner):
    """Raises an error for a step of one token per sequence that synchronizes with the device."""

    num_quiet = 0

    def launch(self, plan: StepPlan) -> LaunchedGpuStep:
        if any(s.num_scheduled > 1 for s in plan.scheduled):
            return super().launch(plan)
        self.num_quiet += 1
        with nothing_asked(torch.device(self.model.device)):
            return super().launch(plan)


def model_on(device: torch.device, config: ModelConfig = CONFIG, kernels: str = "triton") -> Transformer:
    model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels=kernels, device=str(device))
    assert isinstance(model, Transformer)
    return model


def pages_for(model: Transformer, blocks: int = 64) -> PagedKv:
    return PagedKv.allocate(KvLayout.of(model.config, block_tokens=4, dtype="float32"), blocks, model.device)


def graphs_on(device: torch.device) -> Graphs:
    return CudaGraphs(device) if device.type == "cuda" else TapeGraphs()


def runner_on(
    device: torch.device,
    config: ModelConfig = CONFIG,
    *,
    is_captured: bool = True,
    blocks: int = 64,
    piece_rows: Sequence[int] = (),
) -> DeviceRunner:
    model = model_on(device, config)
    return Quiet(
        model,
        pages_for(model, blocks),
        device_ops_for(device, "triton"),
        max_sequences=PLACES,
        graphs=graphs_on(device) if is_captured else None,
        piece_rows=piece_rows,
    )


def plain_runner(config: ModelConfig = CONFIG) -> Runner:
    model = model_on(torch.device("cpu"), config, "torch")
    return Runner(model, pages_for(model))


def tokens_of(made: Sequence[Generation]) -> list[list[int]]:
    return [g.tokens[len(g.prompt) :] for g in made]


def generated(runner: Runner, params: SamplingParams | Sequence[SamplingParams], count: int = 6) -> list[list[int]]:
    """Generate from prompts whose prefill ends at different steps, so that batches of many sizes decode."""
    turn = iter([11, 5, 4, 20, 20, 20, *[10_000] * 1000])
    return tokens_of(generate(runner, PROMPTS, count, params=params, chunk=lambda _: next(turn)))


GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("config", "is_captured"),
    [
        (CONFIG, True),
        pytest.param(CONFIG, False, marks=pytest.mark.long),
        pytest.param(tiny.config(qk_norm=True), True, marks=pytest.mark.long),
        pytest.param(tiny.config(qkv_bias=True), True, marks=pytest.mark.long),
    ],
    ids=["llama", "llama uncaptured", "qwen3", "qwen2"],
)
def test_tokens_are_the_torch_family_s(device: torch.device, config: ModelConfig, is_captured: bool) -> None:
    runner = runner_on(device, config, is_captured=is_captured)
    if is_captured:
        runner.capture_all()
    assert generated(runner, GREEDY) == generated(plain_runner(config), GREEDY)
    assert isinstance(runner, Quiet)
    assert runner.num_quiet > 4
    if is_captured and device.type == "cpu":
        graphs = runner._captured._graphs  # type: ignore[union-attr]
        assert graphs.captured == 4  # type: ignore[attr-defined]
        assert graphs.replayed == runner.num_quiet  # type: ignore[attr-defined]


def test_padding_touches_no_page_and_rows_read_only_their_own_pages(device: torch.device) -> None:
    runner = runner_on(device)
    runner.kv.pages.fill_(torch.nan)
    runner.capture_all()
    assert runner.kv.pages.isnan().all(), "the warm-up writes to no page"
    made = generate(runner, PROMPTS[:3], 6)  # steps of three sequences, padded to four
    assert tokens_of(made) == tokens_of(generate(plain_runner(), PROMPTS[:3], 6))
    theirs = torch.zeros(64, 4, dtype=torch.bool)
    for g in made:
        for position in range(g.computed):
            theirs[g.blocks[position // 4], position % 4] = True
    written = ~runner.kv.pages.isnan().cpu()
    assert torch.equal(written, theirs[:, None, None, None, :, None].expand_as(written))


def test_steps_with_prompts_in_captured_pieces_give_the_same_tokens_and_write_no_other_page(
    device: torch.device,
) -> None:
    config = tiny.config(qk_norm=True)
    runner = runner_on(device, config, piece_rows=(8, 16))
    runner.kv.pages.fill_(torch.nan)
    runner.capture_all()
    assert runner.kv.pages.isnan().all(), "the warm-up writes to no page"
    pieces = runner._pieces
    assert pieces is not None
    assert pieces.ready == (8, 16)
    sizes: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        fit = pieces.size_for
        patch.setattr(pieces, "size_for", lambda rows: sizes.append(fit(rows)) or sizes[-1])
        turn = iter([1, 2, 2, 2, 1, 5, 5, 5, *[10_000] * 1000])  # steps of 7, 16 and 23 rows, then of decode rows
        made = generate(runner, PROMPTS, 4, chunk=lambda _: next(turn))
    assert tokens_of(made) == generated(plain_runner(config), GREEDY, 4)
    assert sizes == [8, 16, None]
    written = ~runner.kv.pages.isnan().cpu()
    assert int(written[:, 0, 0, 0, :, 0].sum()) == sum(g.computed for g in made)


WISHES = [
    SamplingParams(temperature=1.1, seed=3, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.4, logit_bias={65: 2.0, 9999: 1.0}),
    SamplingParams(temperature=0.8, seed=-5, top_k=20, frequency_penalty=0.6, presence_penalty=0.2),
    GREEDY,
]


@pytest.mark.long
def test_draws_are_the_host_s(device: torch.device) -> None:
    assert generated(runner_on(device), WISHES) == generated(plain_runner(), WISHES)


@pytest.mark.long
def test_log_probabilities_come_from_the_host_s_sampler(device: torch.device) -> None:
    asking = [SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=1.0, seed=2, logprobs=0)]
    model = model_on(device)
    runner = DeviceRunner(
        model, pages_for(model), device_ops_for(device, "triton"), max_sequences=PLACES, graphs=graphs_on(device)
    )
    made = generate(runner, PROMPTS[:3], 5, params=[*asking, GREEDY])
    expected = generate(plain_runner(), PROMPTS[:3], 5, params=[*asking, GREEDY])
    assert tokens_of(made) == tokens_of(expected)
    for ours, theirs in zip(made, expected, strict=True):
        assert [[t for t, _ in s.top] for s in ours.sampled] == [[t for t, _ in s.top] for s in theirs.sampled]
        for a, b in zip(ours.sampled, theirs.sampled, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_host_read_during_a_capture_is_an_error(device: torch.device) -> None:
    runner = runner_on(device)
    with pytest.raises((Asked, RuntimeError)):
        generate(runner, [[5]], 3, params=SamplingParams(temperature=0, logprobs=1))


@pytest.mark.long
def test_decoding_continues_a_prompt_computed_by_another_runner(device: torch.device) -> None:
    """The decode side of a hand-off: another runner computed the pages and the first token."""
    prefill, decode = plain_runner(), runner_on(device)
    moved = []
    for index, prompt in enumerate(PROMPTS):
        given = Generation(prompt, 1, [*range(index * 16, index * 16 + 16)])  # type: ignore[list-item]
        step(prefill, [given])
        here = Generation([*prompt], 5, given.blocks)
        here.tokens, here.computed = list(given.tokens), given.computed
        moved.append(here)
    decode.kv.pages.copy_(prefill.kv.pages)
    while running := [g for g in moved if not g.is_done]:
        step(decode, running)
    assert tokens_of(moved) == tokens_of(generate(prefill, PROMPTS, 6))
    assert isinstance(decode, Quiet)
    assert decode.num_quiet == 5


def an_engine(runner: Runner) -> Engine:
    return engine_for(
        runner,
        num_blocks=runner.kv.num_blocks,
        block_tokens=4,
        max_model_tokens=64,
        vocab_size=CONFIG.vocab_size,
        eos_token_ids=CONFIG.eos_token_ids,
        limits=LIMITS,
    )


def served(engine: Engine, names: Sequence[str]) -> tuple[dict[str, list[int]], int]:
    """Serve requests that arrive one after the other, one of which is aborted and its id reused; return the tokens by
    request id, and the number of steps launched before the previous one was read.
    """
    tokens: dict[str, list[int]] = {}
    waiting, steps, num_ahead = [*enumerate(names)], 0, 0
    while waiting or engine.has_work:
        if waiting and steps % 2 == 0:
            index, name = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
            prompt = [10 + index, *PROMPTS[index % 3]]
            if engine.abort(RequestId(name)):
                tokens[RequestId(name)] = []
            engine.add(EngineRequest(RequestId(name), prompt, params))
        for update in engine.step().updates:
            tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        engine.check_integrity()
        num_ahead += engine._pipeline.is_ahead
        steps += 1
    assert engine.is_idle
    return tokens, num_ahead


@pytest.mark.long
def test_an_engine_short_of_pages_with_names_used_twice(device: torch.device) -> None:
    names = ["a", "b", "c", "a", "d", "e"]
    runner = runner_on(device, blocks=17, piece_rows=(16,))
    engine = an_engine(runner)
    plain = plain_runner()
    plainly = an_engine(Runner(plain.model, pages_for(plain.model, 17)))  # type: ignore[arg-type]
    tokens, num_ahead = served(engine, names)
    assert tokens == served(plainly, names)[0]
    assert engine.scheduler.num_preemptions > 0
    assert num_ahead > 0


def test_the_largest_is_ready_at_once_and_the_others_follow(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = runner_on(device)
    captured = runner._captured
    assert captured is not None
    seen = [captured.ready]
    running = [Generation([5], 9, [0, 1, 2, 3])]  # type: ignore[list-item]
    while captured.is_waiting:
        step(runner, running)
        seen.append(captured.ready)
    assert seen == [(5,), (4, 5), (2, 4, 5), (1, 2, 4, 5)]
    assert [r.message.split(":")[0] for r in caplog.records] == ["decode steps of up to 5 rows are captured in 4 sizes"]
    assert tokens_of(running)[0] == tokens_of(generate(plain_runner(), [[5]], 3))[0]


class Failing(TapeGraphs):
    """Graphs with memory for one capture."""

    def capture(self, launch: Launch) -> Launch:
        if self.captured:
            raise MemoryError("out of memory")
        return super().capture(launch)


def test_steps_that_cannot_be_captured_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = model_on(torch.device("cpu"))
    ops = device_ops_for("cpu", "triton")
    runner = DeviceRunner(model, pages_for(model), ops, max_sequences=PLACES, graphs=Failing())
    assert generated(runner, GREEDY, 4) == generated(plain_runner(), GREEDY, 4)
    assert "cannot capture decode steps of 4 rows or fewer; they run eagerly: out of memory" in caplog.text


def test_contexts_longer_than_the_captured_ones_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_sizes, "_ROW_TOKENS", 40)  # 20 tokens for each of two rows, 40 tokens for one row
    long = list(range(100, 117))
    runner = runner_on(torch.device("cpu"))
    runner.capture_all()
    made = generate(runner, [[5], long], 8)
    assert tokens_of(made) == tokens_of(generate(plain_runner(), [[5], long], 8))
    graphs = runner._captured._graphs  # type: ignore[union-attr]
    assert graphs.replayed < runner.num_quiet  # type: ignore[attr-defined]
    graphs.replayed = 0  # type: ignore[attr-defined]
    generate(runner, [long], 4)
    assert graphs.replayed == 3  # type: ignore[attr-defined]


def one_token(number: int, banned: Sequence[int] = ()) -> StepPlan:
    """Return a plan of one sequence whose prompt is one token."""
    return StepPlan(
        (
            ScheduledSequence(
                request_id=RequestId("a"),
                token_ids=[5],
                num_prompt=1,
                num_computed=0,
                num_scheduled=1,
                block_ids=[BlockId(0)],
                num_sampled=1,
                sampling=GREEDY,
                sample_index=0,
                banned_token_ids=banned,
                table_version=number,
            ),
        )
    )


@pytest.mark.long
def test_damaged_weights_and_a_ban_on_everything_fail_the_row_by_name(device: torch.device) -> None:
    runner = runner_on(device)
    assert runner.run(one_token(1, range(258))).outputs[RequestId("a")].tokens[0].token_id == 258
    assert runner.run(one_token(2, range(259))).failures[RequestId("a")].reason == "NO_TOKEN_LEFT"
    long = Generation(PROMPTS[1], 3, [*range(16)])  # type: ignore[list-item]
    step(runner, [long])
    with torch.inference_mode():
        runner._transformer.weights.final_norm.fill_(torch.nan)
    failed = runner.run(one_token(3, ()))
    assert failed.outputs == {}
    assert failed.failures[RequestId("a")].message.startswith("request a: a logit at position 1 is not finite")


def test_a_failed_step_leaves_no_wrong_token(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """When sampling one row fails, the replay has already stored the next tokens of all other rows."""
    runner = runner_on(device)
    first = Generation(PROMPTS[1], 8, [*range(16)])  # type: ignore[list-item]
    other = Generation(PROMPTS[3], 8, [*range(16, 32)])  # type: ignore[list-item]
    for _ in range(3):
        step(runner, [first, other])

    def fails(*_: object) -> None:
        raise InvariantBroken("all tokens are banned")

    other.params = SamplingParams(temperature=0, logprobs=1)
    monkeypatch.setattr(runner, "_by_host", fails)
    with pytest.raises(InvariantBroken):
        step(runner, [first, other])
    while not first.is_done:
        step(runner, [first])
    assert tokens_of([first]) == tokens_of(generate(plain_runner(), [PROMPTS[1]], 8))


def test_steps_whose_results_are_not_awaited_are_not_replayed() -> None:
    """Without the wait, a replay could overwrite the input buffers before they are copied."""
    runner = runner_on(torch.device("cpu"))
    runner.capture_all()
    made = generate(runner, [PROMPTS[1]], 4, chunk=lambda _: 1)
    assert tokens_of(made) == tokens_of(generate(plain_runner(), [PROMPTS[1]], 4))
    graphs = runner._captured._graphs  # type: ignore[union-attr]
    assert graphs.replayed == 4  # type: ignore[attr-defined]


def test_more_sequences_than_places_are_refused(device: torch.device) -> None:
    with pytest.raises(InvariantBroken, match="6 sequences in a step with 5 batch slots"):
        generate(runner_on(device), [[5]] * 6, 2)


def test_an_empty_step_and_a_step_without_sampled_rows(device: torch.device) -> None:
    runner = runner_on(device)
    assert runner.run(StepPlan(())).outputs == {}
    long = Generation(PROMPTS[3], 3, [*range(16)])  # type: ignore[list-item]
    for _ in range(3):
        step(runner, [long], lambda _: 1)  # one prompt token per step
    assert long.sampled == []
    step(runner, [long])
    assert long.tokens[-1] == tokens_of(generate(plain_runner(), [PROMPTS[3]], 1))[0][0]


def test_only_a_gpu_with_its_own_kernels_gets_such_a_runner() -> None:
    model = model_on(torch.device("cpu"))
    assert type(build_runner(model, pages_for(model), max_sequences=2)) is Runner
    with pytest.raises(UsageError, match="cuda_graphs must be one of auto, off, not 'on'") as caught:
        LLM("tiny", cuda_graphs="on")
    assert caught.value.field == "cuda_graphs"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch detects no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_on_a_gpu_give_the_same_tokens_with_graphs_and_without(dtype: str) -> None:
    made = [
        LLM("tiny", device="cuda", dtype=dtype, kv_memory=8 << 20, cuda_graphs=way).generate(
            ["hello", "a longer one", "x"], SamplingParams(temperature=0.7, seed=4, max_tokens=24)
        )
        for way in ("auto", "off")
    ]
    assert [c.token_ids for c in made[0]] == [c.token_ids for c in made[1]]


@pytest.mark.long
def test_rows_with_adapters_are_not_captured_and_give_the_tokens_of_torch(device: torch.device, tmp_path: Path) -> None:
    adapters = [read_adapter(write(tmp_path / str(n), CONFIG, seed=n), CONFIG, max_rank=8) for n in range(2)]
    slots = [0, NO_SLOT, 1, 0]
    made = {}
    for runner in (plain_runner(), runner_on(device, piece_rows=(16,))):
        if isinstance(runner, DeviceRunner):
            runner.capture_all()
        for slot, adapter in enumerate(adapters):
            runner.activate(slot, runner.model.pack_adapter(adapter))
        made[type(runner)] = tokens_of(generate(runner, PROMPTS, 6, slots=slots))
    assert made[Quiet] == made[Runner]
    assert made[Runner] != tokens_of(generate(plain_runner(), PROMPTS, 6))
