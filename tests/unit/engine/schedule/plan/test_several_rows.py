"""Sequences with several sampled rows and several tokens per step; the invariants of the counters hold."""

import pytest
from harness.fakes.engines import EOS, ArithmeticRunner, a_request, an_engine, expected_tokens
from harness.fakes.stepping import GREEDY
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import FinishReason, SampledToken, SamplingParams
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.batch import build_batch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.step import ScheduledSequence, SequenceOutput, StepPlan, StepResult, drawn_rows
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
    name: str,
    first_block: int,
    *,
    computed: int,
    end: int,
    sampled: int,
    sampling: SamplingParams = GREEDY,
    tokens: list[int] = TOKENS,
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId(name),
        token_ids=tokens[:end],
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
    from kvferry.engine.execute.gpu.runner import DeviceRunner
    from kvferry.engine.execute.models.transformer import Transformer

    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32", kernels="reference")
    assert isinstance(model, Transformer)
    kv = PagedKv.allocate(KvLayout.of(CONFIG, block_tokens=4, dtype="float32"), 16)
    return DeviceRunner(model, kv, device_ops_for("cpu", "reference"), max_sequences=4)


def continued(runner: Runner, sampling: SamplingParams, count: int) -> list[SampledToken]:
    """Sample `count` tokens after four tokens, one per step."""
    tokens, sampled = TOKENS[:4], []
    for _ in range(count):
        item = share("x", 12, computed=0, end=len(tokens), sampled=1, sampling=sampling, tokens=tokens)
        (token,) = runner.run(StepPlan((item,))).outputs[RequestId("x")].tokens
        sampled.append(token)
        tokens = [*tokens, token.token_id]
    return sampled


@pytest.mark.parametrize("kernels", ["compiled", "torch", "device"])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_drafts_are_accepted_up_to_the_first_that_is_not_sampled(kernels: str, num_right: int) -> None:
    runner = a_device_runner() if kernels == "device" else a_runner(kernels)
    expected = [continued(runner, params, 4) for params in WAYS]
    shares = [share("one", 0, computed=0, end=5, sampled=1)]
    for i, (params, right) in enumerate(zip(WAYS[:3], expected, strict=False)):
        drafts = [token.token_id for token in right[:3]]
        if num_right < 3:
            drafts[num_right] = (drafts[num_right] + 1) % 200
        shares.append(
            share(f"way {i}", 2 + 2 * i, computed=0, end=7, sampled=4, sampling=params, tokens=TOKENS[:4] + drafts)
        )
    outputs = runner.run(StepPlan(tuple(shares))).outputs
    assert outputs[RequestId("one")].accepted == 5
    for i in range(3):
        output = outputs[RequestId(f"way {i}")]
        assert [token.token_id for token in output.tokens] == [t.token_id for t in expected[i][: num_right + 1]]
        assert output.accepted == 4 + num_right


@pytest.mark.parametrize("kernels", ["compiled", "device"])
def test_log_probabilities_of_accepted_drafts(kernels: str) -> None:
    runner = a_device_runner() if kernels == "device" else a_runner(kernels)
    right = continued(runner, WAYS[3], 3)
    tokens = TOKENS[:4] + [token.token_id for token in right[:2]]
    out = runner.run(StepPlan((share("a", 0, computed=0, end=6, sampled=3, sampling=WAYS[3], tokens=tokens),)))
    ours = out.outputs[RequestId("a")].tokens
    assert [token.token_id for token in ours] == [token.token_id for token in right]
    assert [token.logprob for token in ours] == pytest.approx([token.logprob for token in right], abs=1e-5)


def test_the_outbox_grows_for_more_rows_than_sequences() -> None:
    runner = a_device_runner()  # of four sequences
    tokens = TOKENS[:4] + [token.token_id for token in continued(runner, GREEDY, 3)]
    out = runner.run(StepPlan((share("a", 0, computed=0, end=7, sampled=4, tokens=tokens),)))
    assert len(out.outputs[RequestId("a")].tokens) == 4


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
    assert rows[0] is plan.scheduled[1], "one sampled row per sequence needs no extra array"
    assert [(s.request_id, list(s.token_ids), s.num_computed + s.num_scheduled) for s in rows[1:]] == [
        ("three", TOKENS[:end], end) for end in (5, 6, 7)
    ]


def test_more_sampled_rows_than_scheduled_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="cannot sample 2 rows and score 0 of 1"):
        build_batch(StepPlan((share("a", 0, computed=4, end=5, sampled=2),)), block_tokens=4)


class Guessing:
    """Proposes the next tokens of each decoding sequence, some of them wrong, as speculative decoding does."""

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
        """Return a step's output of 1 + k tokens, of which the first 1 + `right` are accepted and written."""
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
def test_several_tokens_per_step_give_the_tokens_of_single_ones(right: list[int], most: int, length: int) -> None:
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
        # This scheduler plans one token per sequence; the test adds the proposed tokens to the plan before it applies
        # the results.
        result = guessing.run(plan)
        wide = StepPlan(tuple(_widened(s, result) for s in plan.scheduled))
        for update in scheduler.update(wide, result):
            tokens[update.request_id] += [t.token_id for t in update.tokens]
            assert update.tokens
        for sequence in scheduler._admitted.running:
            assert 0 <= sequence.kv.num_computed == sequence.num_tokens - 1
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
