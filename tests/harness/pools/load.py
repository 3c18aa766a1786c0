"""Sends requests continuously to a gateway's HTTP API, like the `openai` package, and checks every response.

A request is retried only if the connection broke before the first byte of the response, at most twice, with the delays
of the `openai` package. Every other failure is counted.
"""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams

if TYPE_CHECKING:
    from kvferry.engine import LLM

LANES = 3
RETRIES = 2
_FIRST_PAUSE_SECONDS = 0.5
_HANG_SECONDS = 150.0
_BETWEEN_SECONDS = 0.1
"""Pause in seconds between two requests of a lane, which leaves CPU time for starting pods."""
_LOOK_SECONDS = 0.05
CLOCK = SystemClock()

_PURSER = (
    "You are the purser of a small ferry. Answer passengers politely and in one sentence. The ferry leaves at nine, at "
    "noon and at five; bicycles travel free, dogs on a lead are welcome, and the crossing takes forty minutes. "
)
_PILOT = (
    "The following is a list of harbours on the northern coast with what each is known for, written down by an old "
    "pilot who wanted his grandchildren to find their way home in fog: a lighthouse with two lamps, a church without "
    "a tower, a mill, three tall pines, and a red barn that can be seen from far away. "
)
_HEADS = (_PURSER, _PILOT, "")
_TAILS = (
    "What is a ferry?",
    "When does the last boat leave?",
    "May I bring my bicycle, and what does it cost?",
    "Name three things that can be seen from the deck on a clear day, and say which is the nearest.",
    "Why is the sea salty?",
    "Tell the shortest story that you know about a captain, a parrot and a lost key.",
)


class Outcome(StrEnum):
    """Result of a request."""

    RIGHT = "right"
    WRONG = "wrong"
    """The text differs from that of a single engine."""
    LOST = "lost"
    """The request failed or had no response."""
    CUT = "cut"
    """The stream was interrupted; the text received before is correct."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the output of a single engine."""

    prompt: str
    max_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of one request."""

    began: float
    ended: float
    outcome: Outcome
    retries: int = 0
    note: str = ""

    @property
    def seconds(self) -> float:
        """Duration in seconds, including retries."""
        return self.ended - self.began


def questions(engine: "LLM") -> list[Question]:
    """Generate prompts of 4 to 100 tokens, many with a common prefix, together with a single engine's greedy
    outputs."""
    made = [(head + tail, 16 if number % 2 else 32) for head in _HEADS for number, tail in enumerate(_TAILS)]
    found = []
    for length in (16, 32):
        prompts = [prompt for prompt, tokens in made if tokens == length]
        answers = engine.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True))
        found += [Question(prompt, length, answer.text) for prompt, answer in zip(prompts, answers, strict=True)]
    return found


class Load:
    """Context manager that sends requests until its end; `ended` has the results. Every third lane uses streaming."""

    def __init__(self, http: str, model: str, question_list: Sequence[Question], *, lanes: int = LANES) -> None:
        self._http = http
        self._model = model
        self._asked = question_list
        self._lanes = lanes
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._broke: BaseException | None = None
        self.ended: list[Ended] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(RuntimeError):  # the loop has already ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(2 * _HANG_SECONDS)
        assert not self._thread.is_alive(), "a request hangs"
        if self._broke is not None:
            raise self._broke

    def until(self, holds: Callable[[Sequence[Ended]], bool], what: str, seconds: float) -> None:
        """Wait until `holds(ended)` is true.

        Raises:
            AssertionError: the condition is not true within `seconds`, or the load thread has stopped.
        """
        pause, deadline = threading.Event(), CLOCK.monotonic() + seconds
        while not holds(self.ended[:]):
            assert self._thread.is_alive(), f"the load ended: {self._broke!r}"
            assert CLOCK.monotonic() < deadline, f"not met within {seconds:.0f} s: {what}"
            pause.wait(_LOOK_SECONDS)

    def flows(self, more: int = 6, seconds: float = 90.0) -> None:
        """Wait until `more` requests that start from now on have ended."""
        now = CLOCK.monotonic()
        self.until(
            lambda ended: sum(end.began >= now for end in ended) >= more, f"{more} more requests have ended", seconds
        )

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._drive())
        except BaseException as error:
            self._broke = error
        finally:
            self._loop.close()

    async def _drive(self) -> None:
        limits = httpx.Limits(max_connections=self._lanes, max_keepalive_connections=self._lanes)
        async with httpx.AsyncClient(base_url=self._http, timeout=_HANG_SECONDS, limits=limits) as client:
            await asyncio.gather(*(self._lane(client, number) for number in range(self._lanes)))

    async def _lane(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while not self._stopping.is_set():
            self.ended.append(await self._ask(client, rng.choice(self._asked), stream=number % 3 == 2))
            with suppress(TimeoutError):
                async with asyncio.timeout(_BETWEEN_SECONDS):
                    await self._stopping.wait()

    async def _ask(self, client: httpx.AsyncClient, question: Question, *, stream: bool) -> Ended:
        began, retries = CLOCK.monotonic(), 0
        body = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        while True:
            try:
                request = client.build_request("POST", "/completions", json=body)
                answer = await client.send(request, stream=True)
                break
            except httpx.TransportError as broken:
                if retries == RETRIES:
                    return Ended(began, CLOCK.monotonic(), Outcome.LOST, retries, f"{broken!r}")
            retries += 1
            await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (retries - 1))
        outcome, note = await _read(answer, question.text)
        if outcome is Outcome.CUT and not stream:
            outcome = Outcome.LOST
        return Ended(began, CLOCK.monotonic(), outcome, retries, note)


async def _read(answer: httpx.Response, expected: str) -> tuple[Outcome, str]:
    """Read a response to its end; return the outcome and a note."""
    text, whole = "", False
    try:
        if answer.status_code != 200:
            return Outcome.LOST, f"{answer.status_code}: {(await answer.aread())[:300]!r}"
        if answer.headers["content-type"].startswith("application/json"):
            text, whole = json.loads(await answer.aread())["choices"][0]["text"], True
        else:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    whole = True
                elif line.startswith("data: "):
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return Outcome.LOST, f"in the stream: {chunk['error']}"
                    text += "".join(choice["text"] for choice in chunk["choices"])
    except httpx.TransportError as broken:
        right_so_far = expected.startswith(text)
        return (Outcome.CUT if right_so_far else Outcome.WRONG), f"{broken!r} after {len(text)} characters"
    finally:
        await answer.aclose()
    if not whole and expected.startswith(text):
        return Outcome.CUT, "the stream ended without its end mark"
    return (Outcome.RIGHT, "") if text == expected else (Outcome.WRONG, f"{text!r}, not {expected!r}")
