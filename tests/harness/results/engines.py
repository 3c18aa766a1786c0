"""Rows about an engine's tokens and caches: features in combination, drafts, constraints, late registration."""

import json
import re
from collections.abc import Callable
from random import Random
from statistics import fmean

from harness.fakes.engines import a_request, an_engine, expected_tokens, run_until_idle, small_limits
from harness.fakes.small_engine import engine_for
from harness.results.rows import Outcome
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.policies.policy import POLICIES
from kvferry.engine.schedule.speculation.settings import parse_speculation

_CASES = 300
_SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
}  # fmt: skip


def any_combination() -> Outcome:
    """Draw combinations of chunks, cache hits, preemption and policies, and compare each token with a plain run.

    The runner keeps each token in its KV slot and derives the next one from the slots that it reads, so that a wrong
    page or a position that was not computed changes the tokens.
    """
    draw = Random(16)
    wrong = preempted = hits = chunks = 0
    for case in range(_CASES):
        limits = small_limits(
            scheduling=draw.choice(sorted(POLICIES)), token_budget=draw.choice([8, 32, 64]),
            max_chunk_tokens=draw.choice([3, 16, 64]), max_mixed_tokens=draw.choice([4, 32]),
            max_num_seqs=draw.choice([2, 8]),
        )  # fmt: skip
        engine, runner = an_engine(num_blocks=draw.choice([14, 40, 200]), limits=limits)
        prompts: dict[str, tuple[list[int], int]] = {}
        beginning = [draw.randrange(90) for _ in range(12)]
        for number in range(draw.randrange(2, 10)):
            own = [draw.randrange(90) for _ in range(draw.randrange(1, 20))]
            prompt = [*beginning[: draw.choice([0, 8, 12])], *own]
            prompts[f"{case}-{number}"] = prompt, draw.randrange(1, 12)
        made: dict[str, list[int]] = {}
        for name, (prompt, count) in prompts.items():
            engine.add(a_request(name, prompt, max_tokens=count, priority=draw.randrange(3)))
            for _ in range(draw.randrange(3)):
                for update in engine.step().updates:
                    made.setdefault(update.request_id, []).extend(token.token_id for token in update.tokens)
        for name, tokens in run_until_idle(engine).items():
            made.setdefault(name, []).extend(tokens)
        wrong += sum(made[name] != expected_tokens(*prompt_and_count) for name, prompt_and_count in prompts.items())
        preempted += engine.scheduler.num_preemptions
        hits += engine.scheduler.admission.num_hit_tokens
        chunks += sum(not item.samples for plan in runner.steps for item in plan.scheduled)
        engine.check_integrity()
    return Outcome(
        f"{wrong} of {_CASES} cases differ, with {preempted} preemptions, {hits} cached tokens and {chunks} chunks",
        not wrong and min(preempted, hits, chunks) > 0,
    )


def same_outputs() -> Outcome:
    """Compare batches in small pages, with chunks, shared beginnings and preemption, with one sequence at a time."""
    draw = Random(15)
    beginning = [draw.randrange(5, 200) for _ in range(40)]
    prompts = [
        [*beginning[: draw.choice([0, 20, 40])], *(draw.randrange(5, 200) for _ in range(draw.randrange(3, 60)))]
        for _ in range(24)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    layout = LLM("tiny", dtype="float32", threads=1, block_tokens=4).block_bytes
    paged = LLM(
        "tiny", dtype="float32", kv_memory=60 * layout, threads=1, block_tokens=4, limits=SchedulerLimits(64, 24, 16, 8)
    )
    found = [one.token_ids for one in paged.generate(prompts, sampling)]
    preempted = paged.engine.scheduler.num_preemptions
    reference = LLM(
        "tiny", dtype="float32", kv_memory=1 << 22, kernels="reference", block_tokens=512, async_steps="off"
    )
    expected = []
    for prompt in prompts:
        reference.engine.reset_prefix_cache()
        expected.append(reference.generate([prompt], sampling)[0].token_ids)
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    return Outcome(
        f"{same} of {len(prompts)} outputs of 20 tokens are equal, after {preempted} preemptions",
        same == len(prompts) and preempted > 0,
        "a small model with random weights; tests compare models of each family with Transformers",
    )


def speculation() -> Outcome:
    """Compare drafts from earlier text with none, greedy and sampled."""
    plain, drafted = (_tiny(speculation) for speculation in ("off", "ngram?k=5"))
    rows = []
    same = 0
    for seed in range(24):
        block = [5 + (seed * 13 + index) % 50 for index in range(8)]
        sampling = SamplingParams(temperature=0.0 if seed % 2 else 0.7, seed=seed, max_tokens=48, ignore_eos=True)
        first, steps = _generate(plain, block * 6, sampling)
        second, fewer = _generate(drafted, block * 6, sampling)
        same += first == second
        rows.append(len(second) / fewer if fewer else 0.0)
        assert steps >= fewer
    mean = fmean(rows)
    return Outcome(
        f"{same} of {len(rows)} outputs of a small random model are the same, greedy and sampled; {mean:.2f} tokens per"
        " step on repetitive prompts",
        same == len(rows) and mean > 1.0,
        "draws depend on seed and position only, so that equality of tokens takes the place of a test of distributions",
    )


def constraints() -> Outcome:
    """Check outputs of random weights against a list of choices, a pattern and a schema."""
    llm = _tiny("off")
    kinds: list[tuple[str, Constraint, Callable[[str], bool]]] = [
        ("choices", Constraint(ConstraintKind.CHOICE, '["yes", "no", "maybe"]'), lambda t: t in {"yes", "no", "maybe"}),
        (
            "patterns", Constraint(ConstraintKind.REGEX, "[a-f]{3}-[0-9]{2}"),
            lambda t: re.fullmatch("[a-f]{3}-[0-9]{2}", t) is not None,
        ),
        ("schemas", Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_SCHEMA)), _is_person),
    ]  # fmt: skip
    cells, valid = [], True
    for name, constraint, is_valid in kinds:
        sampling = [SamplingParams(temperature=1.0, seed=n, max_tokens=400, constraint=constraint) for n in range(40)]
        found = llm.generate([f"answer {n}" for n in range(40)], sampling)
        good = sum(is_valid(one.text) for one in found)
        cells.append(f"{good} of {len(found)} {name}")
        valid = valid and good == len(found)
    return Outcome(", ".join(cells) + " are valid", valid)


def _is_person(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict) and set(found) == {"name", "age"} and isinstance(found["age"], int)
        and 0 <= found["age"] <= 150 and len(found["name"]) <= 8
    )  # fmt: skip


def late_registration() -> Outcome:
    """Find the first step after which a request hits a block that the output of another request completed."""
    found = {ahead: _first_hit(runs_ahead=ahead) for ahead in (False, True)}
    return Outcome(
        f"the output's block is found after {found[False]} tokens of the block after it without asynchronous steps, and"
        f" after {found[True]} with them",
        found[True] - found[False] <= 1,
        "a request that arrives while a step is launched ahead is planned after that step was recorded: it waits a step"
        " longer, and misses no block that it would have hit otherwise",
    )


def _first_hit(*, runs_ahead: bool) -> int:
    """Return the number of X's tokens after its block that have been read when Y, which begins like X, first hits the
    block.
    """
    from harness.fakes.recorded import LaunchingRunner

    for tokens_after in range(4):
        engine = engine_for(
            LaunchingRunner(), num_blocks=64, block_tokens=4, max_model_tokens=200, vocab_size=1 << 20,
            eos_token_ids=(), limits=small_limits(token_budget=64, max_chunk_tokens=64),
            runs_ahead=runs_ahead,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        engine.add(EngineRequest(RequestId("X"), list(range(11, 19)), sampling))
        seen: list[int] = []
        while len(seen) < 4 + tokens_after:  # the output's first four tokens are a block
            seen += [token.token_id for update in engine.step().updates for token in update.tokens]
        engine.add(EngineRequest(RequestId("Y"), [*range(11, 19), *seen[:4], 50], sampling))
        while True:
            cached = [u.num_cached for u in engine.step().updates if u.request_id == "Y"]
            if cached:
                break
        if cached[0] == 12:
            return tokens_after
    raise AssertionError("request Y never hit the block")


def _tiny(speculation: str) -> LLM:
    parse_speculation(speculation)
    return LLM("tiny", dtype="float32", kv_memory=16 << 20, threads=1, speculation=speculation, async_steps="off")


def _generate(llm: LLM, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], int]:
    """Return the tokens, and the number of steps after the first token."""
    engine = llm.engine
    engine.add(EngineRequest(RequestId("one"), prompt, sampling))
    tokens: list[int] = []
    steps = 0
    while engine.has_work:
        before = len(tokens)
        tokens += [token.token_id for update in engine.step().updates for token in update.tokens]
        steps += bool(before) and len(tokens) > before
    return tokens[1:], steps
