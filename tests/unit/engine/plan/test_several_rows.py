"""A sequence may sample several rows in a step, and get several tokens from it; the laws of the counters hold."""

import pytest
from harness.fakes.engines import EOS, ArithmeticRunner, a_request, an_engine, expected_tokens
from harness.fakes.stepping import GREEDY
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.engine.models.build import build_model
from kvferry.engine.plan.step import ScheduledSequence, SequenceOutput, StepPlan, StepResult, drawn_rows
from kvferry.engine.run.runner import Runner
from kvferry.engine.tensors.batch import build_batch
from kvferry.engine.tensors.paged_kv import PagedKv
from kvferry.kernels.ops import device_ops_for
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

CONFIG = tiny.config()
TOKENS = [5, 17, 200, 31, 8, 90, 7]
WAYS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=4, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=-3, logprobs=2),
]


def share(
    name: str, first_block: int, *, computed: int, end: int, sampled: int, sampling: SamplingParams = GREEDY
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId(name),
        token_ids=TOKENS[:end],
        num_prompt=3,
        num_computed=computed,
        num_scheduled=end - computed,
        block_ids=[BlockId(first_block), BlockId(first_block + 1)],
        num_sampled=sampled,
        sampling=sampling,
        sample_index=0,
    )


def a_runner(kernels: str) -> Runner:
    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32", kernels=kernels)
    return Runner(model, PagedKv.allocate(KvLayout.of(CONFIG, block_tokens=4, dtype="float32"), 16))


def a_device_runner() -> Runner:
    from kvferry.engine.gpu.runner import DeviceRunner
    from kvferry.engine.models.transformer import Transformer

    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32", kernels="reference")
    assert isinstance(model, Transformer)
    kv = PagedKv.allocate(KvLayout.of(CONFIG, block_tokens=4, dtype="float32"), 16)
    return DeviceRunner(model, kv, device_ops_for("cpu", "reference"), max_sequences=4)


@pytest.mark.parametrize("kernels", ["compiled", "torch", "device"])
def test_each_sampled_row_draws_what_a_step_that_ends_there_draws(kernels: str) -> None:
    runner = a_device_runner() if kernels == "device" else a_runner(kernels)
    plan = StepPlan(
        (
            share("one", 0, computed=0, end=5, sampled=1),
            *[share(f"way {i}", 2 + 2 * i, computed=0, end=7, sampled=4, sampling=p) for i, p in enumerate(WAYS)][:3],
        )
    )
    together = runner.run(plan).outputs
    assert {name: len(out.tokens) for name, out in together.items()} == {"one": 1, "way 0": 4, "way 1": 4, "way 2": 4}
    assert all(out.accepted == s.num_scheduled for s, out in zip(plan.scheduled, together.values(), strict=True))
    for i, params in enumerate(WAYS[:3]):
        for row, end in enumerate(range(4, 8)):
            alone = runner.run(StepPlan((share("x", 12, computed=0, end=end, sampled=1, sampling=params),)))
            assert together[RequestId(f"way {i}")].tokens[row] == alone.outputs[RequestId("x")].tokens[0]


@pytest.mark.parametrize("kernels", ["compiled", "device"])
def test_log_probabilities_of_several_rows(kernels: str) -> None:
    runner = a_device_runner() if kernels == "device" else a_runner(kernels)
    out = runner.run(StepPlan((share("a", 0, computed=0, end=6, sampled=2, sampling=WAYS[3]),)))
    for row, end in enumerate((5, 6)):
        alone = runner.run(StepPlan((share("x", 8, computed=0, end=end, sampled=1, sampling=WAYS[3]),)))
        ours, theirs = out.outputs[RequestId("a")].tokens[row], alone.outputs[RequestId("x")].tokens[0]
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_more_rows_than_sequences_fit_the_way_back_to_the_host() -> None:
    runner = a_device_runner()  # of four sequences
    out = runner.run(StepPlan((share("a", 0, computed=0, end=7, sampled=7),)))
    assert len(out.outputs[RequestId("a")].tokens) == 7


def test_sampled_rows_are_the_last_of_each_sequence() -> None:
    plan = StepPlan(
        (
            share("none", 0, computed=0, end=3, sampled=0),
            share("one", 2, computed=4, end=5, sampled=1),
            share("three", 4, computed=2, end=7, sampled=3),
        )
    )
    assert build_batch(plan, block_tokens=4).sample_rows.tolist() == [3, 6, 7, 8]
    rows = drawn_rows(plan.scheduled)
    assert rows[0] is plan.scheduled[1], "nothing is made for a sequence of one row"
    assert [(s.request_id, list(s.token_ids), s.num_computed + s.num_scheduled) for s in rows[1:]] == [
        ("three", TOKENS[:end], end) for end in (5, 6, 7)
    ]


def test_more_sampled_rows_than_scheduled_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="2 of 1 rows are to be sampled"):
        build_batch(StepPlan((share("a", 0, computed=4, end=5, sampled=2),)), block_tokens=4)


class Guessing:
    """Guesses the next tokens of each decoding sequence, some of them wrongly, as speculative decoding does."""

    def __init__(self, runner: ArithmeticRunner, right: list[int]) -> None:
        self.runner, self.right, self.turn = runner, right, 0

    def run(self, plan: StepPlan) -> StepResult:
        result = self.runner.run(plan)
        outputs = dict(result.outputs)
        for item in plan.scheduled:
            if item.num_sampled and item.num_scheduled == 1:
                outputs[item.request_id] = self.guess(item, outputs[item.request_id])
        return StepResult(outputs)

    def guess(self, item: ScheduledSequence, first: SequenceOutput) -> SequenceOutput:
        """What a step of 1 + k tokens would bring of which the first 1 + `right` are accepted: their KV is written."""
        self.turn += 1
        room = len(item.block_ids) * self.runner.block_tokens - len(item.token_ids)
        right = min(self.right[self.turn % len(self.right)], room)
        more = expected_tokens([*item.token_ids, first.tokens[0].token_id], right)
        tokens = [first.tokens[0].token_id, *more]
        for i, token in enumerate(tokens[:-1]):
            block, slot = divmod(len(item.token_ids) + i, self.runner.block_tokens)
            self.runner.pages[item.block_ids[block]][slot] = token
        return SequenceOutput(tuple(map(SampledToken, tokens)), 1 + right)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 17))
def test_several_tokens_a_step_give_the_tokens_of_one_a_step(right: list[int], most: int, length: int) -> None:
    engine, runner = an_engine(num_blocks=24)
    guessing = Guessing(runner, right)
    prompts = {"a": list(range(length)), "b": list(range(30, 35))}
    for name, prompt in prompts.items():
        engine.add(a_request(name, prompt, max_tokens=most))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    scheduler = engine.scheduler
    for _ in range(200):
        if scheduler.is_idle:
            break
        plan = scheduler.schedule()
        # This scheduler plans one token a sequence; the test adds the guesses to the plan that it books.
        result = guessing.run(plan)
        wide = StepPlan(tuple(_widened(s, result) for s in plan.scheduled), plan.copies)
        for update in scheduler.update(wide, result):
            tokens[update.request_id] += [t.token_id for t in update.tokens]
            assert update.tokens
        for sequence in scheduler._running:
            assert 0 <= sequence.num_computed == sequence.num_tokens - 1
        engine.check_integrity()
    assert tokens == {name: expected_tokens(prompt, most) for name, prompt in prompts.items()}
    assert engine.is_idle


def _widened(item: ScheduledSequence, result: StepResult) -> ScheduledSequence:
    from dataclasses import replace

    count = len(result.outputs[item.request_id].tokens)
    return item if item.num_scheduled > 1 else replace(item, num_scheduled=count, num_sampled=count)


def test_tokens_after_the_one_that_ends_the_sequence_are_dropped() -> None:
    engine, _ = an_engine()
    engine.add(a_request("a", [1, 2, 3], max_tokens=30))
    engine.step()
    plan = engine.scheduler.schedule()
    tokens = tuple(map(SampledToken, (5, EOS, 6)))
    wide = _widened(plan.scheduled[0], StepResult({RequestId("a"): SequenceOutput(tokens, 3)}))
    (update,) = engine.scheduler.update(StepPlan((wide,)), StepResult({RequestId("a"): SequenceOutput(tokens, 3)}))
    assert [t.token_id for t in update.tokens] == [5, EOS]
    assert update.finish_reason is FinishReason.STOP
    assert engine.is_idle


@pytest.mark.parametrize(
    ("tokens", "accepted"), [((), 1), ((5, 6), 1), ((5, 6), 2), ((5,), 0)], ids=["none", "few", "many", "no progress"]
)
def test_an_output_that_does_not_fit_its_share_is_refused(tokens: tuple[int, ...], accepted: int) -> None:
    engine, _ = an_engine()
    engine.add(a_request("a", [1, 2, 3], max_tokens=30))
    engine.step()
    plan = engine.scheduler.schedule()
    wrong = StepResult({RequestId("a"): SequenceOutput(tuple(map(SampledToken, tokens)), accepted)})
    with pytest.raises(InvariantBroken, match="request a"):
        engine.scheduler.update(plan, wrong)
