"""The rejection rule in an engine: outputs of the tiny model have exactly the distribution of a run without drafts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from harness.chi_square import chi_square

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.execute.drafts.draft_model import DraftModel
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run import rejection
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.run.sampler import adjust, probabilities
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.offline.completion import Completion
from kvferry.engine.schedule.speculation.draft_depth import DraftDepth
from kvferry.engine.schedule.speculation.draft_lengths import WholeDrafts
from kvferry.engine.schedule.speculation.matches import Tokens
from kvferry.engine.schedule.speculation.model_drafts import ModelDrafts
from kvferry.engine.schedule.speculation.proposers import NO_DRAFT, Draft, Proposer
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan, draft_tokens
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

CONFIG = tiny.config()
Floats = npt.NDArray[np.float64]


class Blended(tiny.TinyTensors):
    """Weights near those of the tiny model."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        other = tiny.TinyTensors(CONFIG, seed=1).read(name)
        return np.float32(0.9) * super().read(name) + np.float32(0.3) * other


class Silent:
    """A proposer without proposals."""

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        return NO_DRAFT


class Fixed:
    """Proposes the same output for the same prompt."""

    def __init__(self, prompt: list[int], output: tuple[int, ...]) -> None:
        self._tokens = (*prompt, *output)

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        return Draft(self._tokens[len(tokens) : len(tokens) + limit], 3)


def a_model(speculation: str = "off", *, kv_memory: int = 1 << 20, max_sequences: int = 16) -> LLM:
    limits = SchedulerLimits(token_budget=256, max_chunk_tokens=32, max_num_seqs=max_sequences)
    return LLM("tiny", dtype="float32", kv_memory=kv_memory, limits=limits, speculation=speculation)


def near_model() -> DraftModel:
    """Return a draft model whose distributions overlap with those of the tiny model."""
    model = build_model(CONFIG, Blended(CONFIG), dtype="float32")
    layout = KvLayout.of(CONFIG, block_tokens=16, dtype="float32")
    return DraftModel(Runner(model, PagedKv.allocate(layout, 64)), vocab_size=CONFIG.vocab_size)


def rejecting(llm: LLM, proposer: Proposer, model: ModelDrafts | None, num_drafts: int = 3) -> Speculation:
    """Give an engine drafts of a fixed length that are accepted by the rejection rule."""
    found = Speculation(
        proposer,
        WholeDrafts(),
        num_drafts=num_drafts,
        draft_model=model,
        depth=DraftDepth(num_drafts, is_fixed=True),
        is_rejecting=True,
    )
    llm.engine.scheduler.drafting.speculation = found
    return found


PROMPT = list(b"abcabcabc abc")
SAMPLED = SamplingParams(temperature=1.4, top_k=4, max_tokens=4, seed=0, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "top k": {},
    "penalties": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "cuts": {"top_k": 6, "top_p": 0.85, "min_p": 0.02},
    "typical p": {"top_k": 8, "typical_p": 0.8},
}
NUM_DRAWS = 2560


class Exact:
    """Distributions of the tiny model, computed row by row without drafts."""

    def __init__(self, params: SamplingParams) -> None:
        layout = KvLayout.of(CONFIG, block_tokens=16, dtype="float32")
        model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32")
        self._runner, self._params = Runner(model, PagedKv.allocate(layout, 4)), params

    def next_token(self, prompt: list[int], output: tuple[int, ...]) -> Floats:
        """Return the distribution of the token after an output."""
        tokens = [*prompt, *output]
        blocks = [BlockId(block) for block in range(4)]
        s = ScheduledSequence(
            RequestId("a"), tokens, len(prompt), 0, len(tokens), blocks, 1, self._params, sample_index=0
        )
        logits = self._runner.compute(self._runner.prepare(StepPlan((s,)))).logits.values[0].astype(np.float64)
        return probabilities(adjust(logits, s), self._params)

    def outputs(self, prompt: list[int], num_tokens: int, stops: tuple[int, ...] = ()) -> dict[object, float]:
        """Return the probability of each output."""
        known: dict[tuple[int, ...], float] = {(): 1.0}
        for length in range(num_tokens):
            for output in [output for output in known if len(output) == length and not set(output) & set(stops)]:
                share = known.pop(output)
                after = self.next_token(prompt, output)
                known |= {(*output, int(token)): share * after[token] for token in np.flatnonzero(after)}
        assert sum(known.values()) == pytest.approx(1.0)
        return dict(known)


def drafts_of(kind: str) -> tuple[Proposer, ModelDrafts | None]:
    """Return a proposer from the text, or a draft model."""
    if kind == "text":
        rows, output = Exact(SAMPLED), tuple[int, ...]()
        for _ in range(4):
            output = (*output, int(rows.next_token(PROMPT, output).argmax()))
        return Fixed(PROMPT, output), None
    return Silent(), near_model()


def seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(count)]


def outputs_of(llm: LLM, prompt: list[int], params: SamplingParams, count: int = NUM_DRAWS) -> list[Completion]:
    """Return outputs with seeds 0, 1, .., in batches of 16 whose sequences start together: beside prompts, no step has
    drafts."""
    all_params = seeded(params, count)
    return [one for first in range(0, count, 16) for one in llm.generate([prompt] * 16, all_params[first : first + 16])]


@pytest.mark.parametrize("kind", ["text", "model"])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_have_the_exact_distribution(name: str, kind: str) -> None:
    params = replace(SAMPLED, **KINDS[name])
    llm = a_model()
    speculation = rejecting(llm, *drafts_of(kind))
    found = outputs_of(llm, PROMPT, params)
    statistic, critical = chi_square(Counter(tuple(c.token_ids) for c in found), Exact(params).outputs(PROMPT, 4))
    assert statistic < critical
    counts = speculation.counts
    assert 0.05 * counts.num_draft_tokens < counts.num_accepted_tokens < 0.95 * counts.num_draft_tokens
    assert speculation.is_idle


def test_a_draw_from_the_whole_distribution_after_a_rejection_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_remaining", lambda p, token, source: p)
    llm = a_model()
    rejecting(llm, *drafts_of("model"))
    found = outputs_of(llm, PROMPT, SAMPLED)
    counts = Counter(tuple(c.token_ids) for c in found)
    statistic, critical = chi_square(counts, Exact(SAMPLED).outputs(PROMPT, 4))
    assert statistic > 1.5 * critical


def test_stop_tokens_preemption_and_logprobs() -> None:
    prompt = [*PROMPT, 1, 2, 3]
    rows = Exact(SAMPLED)
    stop = int(np.argsort(rows.next_token(prompt, (int(rows.next_token(prompt, ()).argmax()),)))[-2])
    params = replace(SAMPLED, top_k=3, max_tokens=6, stop_token_ids=(stop,), logprobs=1)
    llm = a_model(kv_memory=26 * a_model().block_bytes)
    speculation = rejecting(llm, *drafts_of("model"))
    found = outputs_of(llm, prompt, params)
    assert llm.engine.scheduler.num_preemptions > 0
    assert speculation.counts.num_accepted_tokens > 100
    statistic, critical = chi_square(
        Counter(tuple(c.token_ids) for c in found), Exact(params).outputs(prompt, 6, stops=(stop,))
    )
    assert statistic < critical
    plain = a_model()
    for one in found[:8]:
        scored = plain.generate(
            [[*prompt, *one.token_ids]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        )[0].prompt_logprobs
        assert scored is not None
        expected = [entry.logprob for entry in scored[-len(one.token_ids) :]]
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(expected, abs=1e-4)


def test_the_model_as_its_own_draft_model_accepts_nearly_everything() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    shares = {}
    for accept in ("exact", "rejection"):
        llm = a_model(f"draft=tiny?k=4&fixed=1&accept={accept}")
        llm.generate([PROMPT] * 16, seeded(params, 16))
        assert llm.engine.speculation is not None
        counts = llm.engine.speculation.counts
        shares[accept] = counts.num_accepted_tokens / max(1, counts.num_draft_tokens)
    assert shares["rejection"] > 0.9
    assert shares["exact"] < 0.7


def test_greedy_and_constrained_requests_have_the_tokens_of_a_run_without_drafts() -> None:
    digits = Constraint(ConstraintKind.REGEX, "(ab|cd)*[0-9]{3} end")
    params = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.9, seed=4, max_tokens=30, constraint=digits),
    ]
    expected = a_model().generate([PROMPT] * 2, params)
    for speculation in ("draft=tiny?k=4&fixed=1&accept=rejection", "suffix?accept=rejection"):
        found = a_model(speculation).generate([PROMPT] * 2, params)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize("speculation", ["draft=tiny?k=4&fixed=1&accept=rejection", "suffix?accept=rejection"])
def test_equal_steps_give_equal_tokens(speculation: str) -> None:
    params = SamplingParams(temperature=1.2, seed=5, max_tokens=40, ignore_eos=True)
    runs = [a_model(speculation).generate([PROMPT], params)[0].token_ids for _ in range(2)]
    assert runs[0] == runs[1]


def test_drafts_have_their_full_length_whatever_was_drawn() -> None:
    llm = a_model()
    rejecting(llm, *drafts_of("model"), num_drafts=4)
    lengths: Counter[int] = Counter()
    llm.runner.watch = lambda plan: lengths.update(s.num_drafts for s in plan.scheduled if s.num_drafts)
    llm.generate([PROMPT] * 8, seeded(SamplingParams(temperature=2.0, max_tokens=6, ignore_eos=True), 8))
    # The last tokens of an output limit the length: with 5, 4, .. tokens left, 4, 3, .. can be drafts.
    assert set(lengths) <= {1, 2, 3, 4}
    assert lengths[4] >= 8


def test_end_tokens_are_not_drafted() -> None:
    llm = a_model()
    rejecting(llm, *drafts_of("model"))
    stops = tuple(range(64, 128))
    drafted: set[int] = set()
    llm.runner.watch = lambda plan: drafted.update(t for s in plan.scheduled if s.num_drafts for t in draft_tokens(s))
    params = SamplingParams(temperature=2.0, max_tokens=8, stop_token_ids=stops)
    llm.generate([PROMPT] * 32, seeded(params, 32))
    assert drafted
    assert not drafted & {*stops, *CONFIG.eos_token_ids}
