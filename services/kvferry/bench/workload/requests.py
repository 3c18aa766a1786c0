"""Requests of a benchmark: arrival time, prompt as token ids, number of output tokens.

Prompts are token ids, so their lengths are exact with any tokenizer. Equal prefixes have equal ids, so prefix caches
and routers see the same sharing in every run with the same seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvferry.bench.workload.arrivals import Arrivals
from kvferry.core.errors import UsageError

FIRST_TOKEN, NUM_TOKENS = 300, 4000
"""Range of the ids: above control tokens and bytes, below the size of common vocabularies."""
_IDS = tuple(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS))  # shared, so that a token of a prompt takes eight bytes
RANDOM, SHARED_PREFIX, MULTI_TURN = "random", "shared-prefix", "multi-turn"
WORKLOADS = (RANDOM, SHARED_PREFIX, MULTI_TURN)
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    at: float
    """Arrival time in seconds after the start."""
    prompt: tuple[int, ...]
    num_output: int
    session: int | None = None
    """Number of the conversation; `None` if the request belongs to no conversation."""
    output: tuple[int, ...] | None = None
    """The output's tokens, `num_output` of them, if the workload defines them; a server generates its own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Kind and sizes of the requests of a benchmark."""

    kind: str = RANDOM
    """One of `WORKLOADS`. `shared-prefix`: each prompt begins with one of a few prefixes; `multi-turn`: each prompt of
    a conversation begins with the prompt before it, and with its answer of the requested number of tokens."""
    num_input: int = 512
    """Mean number of tokens of a prompt, or of a turn for `multi-turn`, without the shared prefix."""
    num_output: int = 128
    spread: float = 0.0
    """Relative spread of both lengths: with 0.5, lengths are between 0.5 and 1.5 times the mean."""
    num_prefix: int = 1024
    """Number of tokens of each shared prefix."""
    num_prefixes: int = 4
    num_turns: int = 4
    turn_seconds: float = 5.0
    """Time between the arrivals of two turns of a conversation in seconds."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: the kind is unknown, or a number is out of range.
        """
        if self.kind not in WORKLOADS:
            raise UsageError(
                f"unknown workload {self.kind!r}; expected one of {', '.join(WORKLOADS)}", field="workload"
            )
        for name, low in (
            ("num_input", 1), ("num_output", 1), ("num_prefix", 0), ("num_prefixes", 1), ("num_turns", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= 1 << 20:
                raise UsageError(f"{name} must be between {low} and {1 << 20}, not {value}", field=name)
        if not 0.0 <= self.spread < 1.0:
            raise UsageError(f"spread must be at least 0 and below 1, not {self.spread}", field="spread")
        if not 0.0 <= self.turn_seconds <= 3600.0:
            raise UsageError(f"turn_seconds must be between 0 and 3600, not {self.turn_seconds}", field="turn_seconds")

    def requests(self, count: int, arrivals: Arrivals, seed: int) -> list[BenchRequest]:
        """Draw `count` requests in order of arrival.

        Args:
            count: number of requests.
            arrivals: arrival process of requests, or of conversations.
            seed: seed of lengths, tokens and arrivals.

        Raises:
            UsageError: `count` is out of range.
        """
        if not 1 <= count <= MAX_REQUESTS:
            raise UsageError(f"requests must be between 1 and {MAX_REQUESTS}, not {count}", field="requests")
        draw = Random(seed)  # noqa: S311  a workload needs no secret numbers
        if self.kind == MULTI_TURN:
            return self._conversations(count, arrivals, draw)
        prefixes = [token_block(f"{seed}/{number}", self.num_prefix) for number in range(self.num_prefixes)]
        requests = []
        for at in arrivals.times(count, draw):
            prefix = draw.choice(prefixes) if self.kind == SHARED_PREFIX else ()
            own = _tokens(draw, self._length(self.num_input, draw))
            requests.append(BenchRequest(at, (*prefix, *own), self._length(self.num_output, draw)))
        return requests

    def _conversations(self, count: int, arrivals: Arrivals, draw: Random) -> list[BenchRequest]:
        starts = arrivals.times(-(-count // self.num_turns), draw)
        requests: list[BenchRequest] = []
        for session, start in enumerate(starts):
            history: tuple[int, ...] = ()
            for turn in range(self.num_turns):
                prompt = (*history, *_tokens(draw, self._length(self.num_input, draw)))
                num_output = self._length(self.num_output, draw)
                requests.append(BenchRequest(start + turn * self.turn_seconds, prompt, num_output, session))
                history = (*prompt, *_tokens(draw, num_output))
        return sorted(requests, key=lambda request: request.at)[:count]

    def _length(self, mean: int, draw: Random) -> int:
        return max(1, round(mean * draw.uniform(1.0 - self.spread, 1.0 + self.spread)))


def token_block(name: str, count: int) -> tuple[int, ...]:
    """Return the `count` tokens that belong to a name; they are the same in every run."""
    return _tokens(Random(name), count)  # noqa: S311


def clipped(requests: Sequence[BenchRequest], *, max_input: int, max_output: int) -> tuple[list[BenchRequest], int]:
    """Truncate prompts and outputs to a server's limits; return the requests and how many were truncated.

    Args:
        requests: the requests.
        max_input: maximum number of tokens of a prompt.
        max_output: maximum number of tokens of an output.
    """
    made = [
        replace(r, prompt=r.prompt[:max_input], num_output=min(r.num_output, max_output), output=None)
        if len(r.prompt) > max_input or r.num_output > max_output
        else r
        for r in requests
    ]
    return made, sum(a is not b for a, b in zip(made, requests, strict=True))


def in_vocabulary(requests: Sequence[BenchRequest], size: int) -> list[BenchRequest]:
    """Map the tokens of requests to a vocabulary of `size` tokens; equal prefixes stay equal.

    Raises:
        UsageError: the vocabulary has no tokens.
    """
    if size < 1:
        raise UsageError(f"vocabulary must be at least 1, not {size}", field="vocabulary")
    if size >= FIRST_TOKEN + NUM_TOKENS:
        return list(requests)
    return [replace(r, prompt=tuple(token % size for token in r.prompt), output=None) for r in requests]


def _tokens(draw: Random, count: int) -> tuple[int, ...]:
    return tuple(_IDS[int(NUM_TOKENS * draw.random())] for _ in range(count))
