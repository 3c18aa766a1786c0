"""Sends requests continuously from a separate thread, a few at a time, and checks every token."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.errors import KvferryError
from kvferry.core.inference.chunks import Timing
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

LANES = 4
HANG_SECONDS = 150.0
"""Client timeout of a request in seconds; longer than the time limits of all cases, so that a case reports the hang."""
_BETWEEN_SECONDS = 0.05
"""Pause in seconds between two requests of a lane, which leaves CPU time for starting workers."""
_LOOK_SECONDS = 0.05
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the tokens that a single engine generates for it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a request."""

    began: float
    ended: float
    """Clock time in seconds at the end of the request; `began` is that at its start."""
    error: str = ""
    """`REASON: message`; empty if the request did not fail."""
    wrong: str = ""
    """Difference from the expected tokens; empty if there is no difference."""
    timing: Timing | None = None

    @property
    def is_right(self) -> bool:
        """Whether the request completed with exactly the expected tokens."""
        return not self.error and not self.wrong


def questions(engine: LLM, *, count: int = 40, seed: int = 7) -> list[Question]:
    """Generate `count` prompts of 130 to 260 tokens with a single engine's outputs of 8 to 48 tokens; some are sampled,
    some share a prefix."""
    rng = random.Random(seed)
    heads = [[rng.randrange(199) for _ in range(80)] for _ in range(4)]
    made: list[Question] = []
    for number in range(count):
        head = rng.choice(heads) if number % 2 else []
        prompt = [*head, *(rng.randrange(199) for _ in range(rng.randrange(130, 180)))]
        is_drawn = number % 3 == 0
        sampling = SamplingParams(
            temperature=0.9 if is_drawn else 0.0,
            seed=number if is_drawn else None,
            max_tokens=rng.choice([8, 16, 48]),
            ignore_eos=True,
        )
        made.append(answered(engine, prompt, sampling))
    return made


def answered(engine: LLM, prompt: Sequence[int], sampling: SamplingParams) -> Question:
    """Return a prompt together with a single engine's output."""
    return Question(tuple(prompt), sampling, tuple(engine.generate([list(prompt)], sampling)[0].token_ids))


async def ask(client: AsyncClient, question: Question, *, leaves_after: int | None = None) -> Ended:
    """Run a request to its end, or disconnect after more than `leaves_after` tokens."""
    began = CLOCK.monotonic()
    tokens: list[int] = []
    timing, error = None, ""
    try:
        async with aclosing(client.generate(question.prompt, question.sampling)) as chunks:
            async for chunk in chunks:
                tokens += [token.token_id for token in chunk.tokens]
                timing = chunk.timing or timing
                if leaves_after is not None and len(tokens) > leaves_after:
                    break
    except KvferryError as failed:
        error = f"{failed.reason}: {failed.message}"
    found, whole = tuple(tokens), question.tokens
    due = whole[: len(found)] if error or leaves_after is not None else whole
    wrong = "" if found == due else f"{len(found)} tokens {found}, not {due}"
    return Ended(began, CLOCK.monotonic(), error, wrong, timing)


class Traffic:
    """Context manager that sends requests until its end; `ended` has the result of each request."""

    def __init__(self, address: str, question_list: Sequence[Question], *, lanes: int = LANES) -> None:
        self._address = address
        self._asked = question_list
        self._lanes = lanes
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._broke: BaseException | None = None
        self.ended: list[Ended] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop starting requests, and wait for running ones. Idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(2 * HANG_SECONDS)
        assert not self._thread.is_alive(), "a request hangs"
        if self._broke is not None:
            raise self._broke

    def until(self, holds: Callable[[Sequence[Ended]], bool], what: str, seconds: float) -> None:
        """Wait until `holds(ended)`; fail after `seconds`, or when a token is wrong."""
        pause, deadline = threading.Event(), CLOCK.monotonic() + seconds
        while not holds(self.ended[:]):
            assert self._thread.is_alive(), f"the traffic ended: {self._broke!r}"
            wrong = [end.wrong for end in self.ended if end.wrong]
            assert not wrong, wrong[0]
            assert CLOCK.monotonic() < deadline, f"not met within {seconds:.0f} s: {what}; {self.summary()}"
            pause.wait(_LOOK_SECONDS)

    def summary(self) -> str:
        """Format the number of requests by result and the last error, for messages."""
        errors = [end.error for end in self.ended if end.error]
        right = sum(end.is_right for end in self.ended)
        return f"{right} right, {len(errors)} errors{f', the last: {errors[-1]}' if errors else ''}"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._drive())
        except BaseException as error:
            self._broke = error
        finally:
            self._loop.close()

    async def _drive(self) -> None:
        await asyncio.gather(*(self._lane(number) for number in range(self._lanes)))

    async def _lane(self, number: int) -> None:
        rng = random.Random(number)
        async with AsyncClient(self._address, timeout=HANG_SECONDS) as client:
            while not self._stopping.is_set():
                end = await ask(client, rng.choice(self._asked))
                self.ended.append(end)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_BETWEEN_SECONDS):
                        await self._stopping.wait()
