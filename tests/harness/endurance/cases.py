"""The requests of an endurance run, drawn from a seed: sampling, constraints, tools, beams, adapters, all features."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.tools import Tool
from kvferry.core.sampling import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "is_well": {"type": "boolean"},
    },
    "required": ["name", "is_well"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("person", "", SCHEMA),
    Tool("weather", "", {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}),
)
CONSTRAINTS = (
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, "[a-c]{2,9}(x|yy)+z"),
    Constraint(ConstraintKind.CHOICE, json.dumps(["first", "second", "a third one"])),
    Constraint(ConstraintKind.JSON_OBJECT, ""),
)


@dataclass(frozen=True)
class Case:
    """One request."""

    number: int
    prompt: tuple[int, ...] | tuple[dict[str, object], ...]
    """Token ids, or the messages of a conversation."""
    sampling: SamplingParams
    model: str = ""
    beams: BeamParams | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    features: tuple[str, ...] = ()
    """Names of the features that the request uses, for the report."""


def draw_heads(seed: int) -> list[tuple[int, ...]]:
    """Draw eight prefixes, with one of which half of the prompts begin, to use caches, tiers, pins and hand-offs."""
    rng = Random(seed)
    return [tuple(rng.randrange(199) for _ in range(rng.choice((64, 129, 300)))) for _ in range(8)]


def draw_cases(count: int, seed: int, adapters: Sequence[str]) -> list[Case]:
    """Draw requests."""
    heads = draw_heads(seed)
    rng = Random(seed + 1)
    return [_case(number, rng, heads, adapters) for number in range(count)]


def _case(number: int, rng: Random, heads: Sequence[tuple[int, ...]], adapters: Sequence[str]) -> Case:
    tail = tuple(rng.randrange(199) for _ in range(rng.choice((1, 15, 16, 17, 33, rng.randrange(1, 200)))))
    prompt = (*rng.choice(heads), *tail) if rng.random() < 0.5 else tail
    if rng.random() < 0.2:
        prompt = (*prompt, *(list(range(30, 60)) * 3))  # repetitive text, so that drafts are proposed
    sampling, features = _sampling(number, rng)
    case = Case(number, prompt, sampling, features=features)
    special = rng.random()
    if special < 0.06:
        beams = BeamParams(rng.choice((2, 3, 5)), rng.choice((2, 6)), ignore_eos=rng.random() < 0.5)
        case = replace(case, sampling=SamplingParams(), beams=beams, features=("beams",))
    elif special < 0.16:
        case = _with_tools(case, rng)
    if rng.random() < 0.25:
        case = replace(case, model=rng.choice(adapters), features=(*case.features, "adapter"))
    if rng.random() < 0.2:
        case = replace(case, n=2 if case.beams is not None else rng.choice((2, 3)), features=(*case.features, "n"))
    if rng.random() < 0.1:
        case = replace(case, cache_salt="pepper", features=(*case.features, "salt"))
    return replace(case, priority=rng.randrange(3))


def _with_tools(case: Case, rng: Random) -> Case:
    """Return a conversation in which the model may or must call a tool."""
    question: dict[str, object] = {
        "role": "user",
        "content": f"{case.number} " + "how is the weather? " * rng.randrange(1, 6),
    }
    sampling = SamplingParams(temperature=rng.choice((0.0, 0.9)), seed=case.number, max_tokens=96)
    choice = rng.choice(("auto", "required", "weather"))
    return replace(
        case, prompt=(question,), sampling=sampling, tools=TOOLS, tool_choice=choice, features=(f"tools {choice}",)
    )


def _sampling(number: int, rng: Random) -> tuple[SamplingParams, tuple[str, ...]]:
    chosen = SamplingParams(temperature=0.0, max_tokens=rng.choice((1, 2, 8, 24, 48)), ignore_eos=True)
    features: list[str] = []
    if rng.random() < 0.5:
        chosen = replace(chosen, temperature=0.9, seed=number, top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 40)))
        features.append("sampled")
    kind = rng.choice(("", "", "constraint", "logprobs", "prompt scores", "penalties", "stop", "bias", "typical"))
    if kind:
        features.append(kind)
    match kind:
        case "constraint":
            constraint = rng.choice(CONSTRAINTS)
            chosen = replace(chosen, constraint=constraint, max_tokens=64, ignore_eos=False)
        case "logprobs":
            chosen = replace(chosen, logprobs=rng.choice((0, 5)))
        case "prompt scores":
            chosen = replace(chosen, prompt_logprobs=rng.choice((0, 3)))
        case "penalties":
            chosen = replace(chosen, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
        case "stop":
            chosen = replace(chosen, stop=(chr(rng.randrange(97, 123)),), ignore_eos=False, max_tokens=48)
        case "bias":
            chosen = replace(chosen, logit_bias={rng.randrange(199): 4.0}, min_tokens=rng.choice((0, 1)))
        case "typical":
            chosen = replace(chosen, typical_p=0.8, min_p=0.01)
    return chosen, tuple(features)
