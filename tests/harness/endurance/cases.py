"""The requests of an endurance run: every feature of sampling, constraints, adapters and vectors, drawn from a seed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvferry.core.constraint import Constraint, ConstraintKind
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
    prompt: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    features: tuple[str, ...] = ()
    """Names of the features that the request uses, for the report."""


def draw_cases(count: int, seed: int, adapters: Sequence[str]) -> list[Case]:
    """Draw requests. Half of the prompts begin with one of eight common prefixes, to use caches, tiers and
    hand-offs.
    """
    rng = Random(seed)
    heads = [tuple(rng.randrange(199) for _ in range(rng.choice((64, 129, 300)))) for _ in range(8)]
    return [_case(number, rng, heads, adapters) for number in range(count)]


def _case(number: int, rng: Random, heads: Sequence[tuple[int, ...]], adapters: Sequence[str]) -> Case:
    tail = tuple(rng.randrange(199) for _ in range(rng.choice((1, 15, 16, 17, 33, rng.randrange(1, 200)))))
    prompt = (*rng.choice(heads), *tail) if rng.random() < 0.5 else tail
    if rng.random() < 0.2:
        prompt = (*prompt, *(list(range(30, 60)) * 3))  # repetitive text, so that drafts are proposed
    sampling, features = _sampling(number, rng)
    case = Case(number, prompt, sampling, features=features)
    if rng.random() < 0.25:
        case = replace(case, model=rng.choice(adapters), features=(*case.features, "adapter"))
    if rng.random() < 0.2:
        case = replace(case, n=rng.choice((2, 3)), features=(*case.features, "n"))
    if rng.random() < 0.1:
        case = replace(case, cache_salt="pepper", features=(*case.features, "salt"))
    return replace(case, priority=rng.randrange(3))


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
