"""Tokens in, tokens out over prefill, hand-off and decode: the tokens of a turn are those of one longer generation."""

import random
from collections.abc import Iterator

import httpx
import pytest
from harness.servers.processes import running

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.engine.schedule.messages import EngineRequest

NUM_PROMPTS = 60
TOKENS = 6
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--connector", "shm")
    addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json", "--log-level", "error")
    with running("up", *flags, *addresses) as process:
        yield str(process.wait_for("ready")["http"])
        assert process.stop() == 0


def whole(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt from one engine."""
    engine = LLM("tiny", dtype="float32", kv_memory=64 << 20).engine
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(RequestId(str(number)), prompt, sampling))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for update in engine.step().updates:
            found.setdefault(update.request_id, []).extend(token.token_id for token in update.tokens)
    return [found[str(number)] for number in range(len(prompts))]


def test_a_second_turn_continues_the_very_tokens_of_the_first(url: str) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(199) for _ in range(rng.randrange(1, 60))] for _ in range(NUM_PROMPTS)]
    expected = whole(prompts, 2 * TOKENS)
    with httpx.Client(base_url=f"http://{url}", timeout=60) as http:
        for prompt, tokens in zip(prompts, expected, strict=True):
            turns = list(prompt)
            for _ in range(2):
                answer = http.post("/inference/v1/generate", json={"token_ids": turns, "sampling_params": GREEDY})
                turns += answer.raise_for_status().json()["choices"][0]["token_ids"]
            assert turns == [*prompt, *tokens]
