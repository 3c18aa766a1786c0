"""Requests of the comparison, drawn from a seed: all engines get the same tokens, and no prompt occurs twice."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FIRST_TOKEN, END_TOKEN = 500, 40_000
"""Range of ids of ordinary words in the embedded model's vocabulary, without control tokens."""
SHARED_TOKENS = 1024
OWN_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the number of tokens to generate after it."""

    tokens: tuple[int, ...]
    new_tokens: int
    at: float = 0.0
    """Arrival time in seconds after the beginning of the trial."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests sent at once, and requests sent before them without being timed."""

    timed: tuple[Request, ...]
    before: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """An engine's measurement of a trial."""

    seconds: float
    """Seconds from passing the requests to the engine to the last token."""
    first_seconds: float
    """Seconds to the first token of any request."""
    input_tokens: int
    output_tokens: int
    ttft: Sequence[float] = ()
    """Seconds from the arrival to the first token, of each request."""
    tpot: Sequence[float] = ()
    """Mean seconds between tokens, of each request."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of the comparison."""

    name: str
    about: str
    trials: Callable[[int], Mapping[str, Trial]]
    """Measurements of a round by the name of their row."""
    rates: Callable[[Outcome], Mapping[str, float]]
    """Measures by the suffix of the row's name."""
    unit: str = "tokens/s"
    prefill_tokens: int = 0
    """Prompt length, if the arithmetic rate is the bound."""
    reads_weights: bool = False
    """Whether reading the weights once per token is the bound."""
    comes_over_time: bool = False
    """Whether requests arrive over time, which some adapters do not support."""


def cells() -> dict[str, Cell]:
    """Return all cells by name, in their order."""
    found = [
        Cell(
            "decode-1",
            "one stream, 32 tokens in, 128 out; tokens/s after the first",
            lambda n: {"decode-1": Trial((_request(_random("decode-1", n), 32, 128),))},
            lambda o: {"": (o.output_tokens - 1) / (o.seconds - o.first_seconds)},
            reads_weights=True,
        ),
        _prefill(1024),
        _prefill(4096),
        Cell(
            "batch-64",
            "64 requests at once, 32 to 512 in, 16 to 128 out; tokens drawn a second",
            lambda n: {"batch-64": Trial(_batch(_random("batch-64", n)))},
            lambda o: {"": o.output_tokens / o.seconds},
        ),
        Cell(
            "prefix-16",
            "16 requests of 1,024 + 32 in, 32 out; drawn a second: a prefix each (cold), one for all computed before",
            lambda n: prefixes(_random("prefix-16", n)),
            lambda o: {"": o.output_tokens / o.seconds},
        ),
        Cell(
            "poisson-2",
            "40 requests of 256 in and 64 out, two a second on average; milliseconds, less is better",
            lambda n: {"poisson-2": Trial(_poisson(_random("poisson-2", n), 40, 2.0))},
            lambda o: {
                " TTFT p50": 1e3 * statistics.median(o.ttft),
                " TTFT p99": 1e3 * sorted(o.ttft)[int(0.99 * len(o.ttft))],
                " TPOT p50": 1e3 * statistics.median(o.tpot),
            },
            unit="ms",
            comes_over_time=True,
        ),
    ]
    return {cell.name: cell for cell in found}


def prefixes(draw: random.Random) -> dict[str, Trial]:
    """Return trials of equal shapes: one without a shared prefix, and one with all but the last tokens shared and
    cached.
    """

    def whole(prefix: tuple[int, ...]) -> Request:
        return Request(prefix + _tokens(draw, OWN_TOKENS), 32)

    cold = tuple(whole(_tokens(draw, SHARED_TOKENS)) for _ in range(16))
    shared = _tokens(draw, SHARED_TOKENS)
    before = Request(shared + _tokens(draw, OWN_TOKENS), 1)
    return {
        "prefix-16 cold": Trial(cold),
        "prefix-16 warm": Trial(tuple(whole(shared) for _ in range(16)), (before,)),
    }


def wrong_counts(trial: Trial, outcome: Outcome) -> str:
    """Return the reason why an outcome does not belong to this trial; empty if it does."""
    expected_in = sum(len(r.tokens) for r in trial.timed)
    expected_out = sum(r.new_tokens for r in trial.timed)
    if (outcome.input_tokens, outcome.output_tokens) == (expected_in, expected_out):
        return ""
    return (
        f"it counted {outcome.input_tokens} tokens in and {outcome.output_tokens} out where {expected_in} and "
        f"{expected_out} were asked"
    )


def _prefill(length: int) -> Cell:
    name = f"prefill-{length}"
    return Cell(
        name,
        f"one prompt of {length:,} tokens, 1 out; prompt tokens/s",
        lambda n: {name: Trial((_request(_random(name, n), length, 1),))},
        lambda o: {"": o.input_tokens / o.seconds},
        prefill_tokens=length,
    )


def _batch(draw: random.Random) -> tuple[Request, ...]:
    return tuple(_request(draw, draw.randint(32, 512), draw.randint(16, 128)) for _ in range(64))


def _poisson(draw: random.Random, count: int, per_second: float) -> tuple[Request, ...]:
    found, at = [], 0.0
    for _ in range(count):
        found.append(Request(_tokens(draw, 256), 64, at))
        at += draw.expovariate(per_second)
    return tuple(found)


def _request(draw: random.Random, length: int, new_tokens: int) -> Request:
    return Request(_tokens(draw, length), new_tokens)


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(count))


def _random(name: str, round_: int) -> random.Random:
    return random.Random(f"{name} {round_}")
