"""A prefill worker behind a link that becomes slow, is cut, or drops packets, in a network namespace."""

import asyncio
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace

import pytest
from harness.faults import cases
from harness.faults.cases import Case
from harness.faults.traffic import CLOCK, Ended, Question, answered
from harness.faults.trial import Felt, Row, undergo, workers_used
from harness.servers import netns
from harness.servers.processes import RunningProcess, running

from kvferry.client import AsyncClient
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

pytestmark = pytest.mark.long

WAIT_SECONDS = 60.0
FAST_MEGABITS, SLOW_MEGABITS = 100.0, 1.0
NUM_TIMED = 9
PROMPT_TOKENS = 960
BLOCK_BYTES = 8 << 10
"""Bytes of a page of 16 tokens of the tiny model in float32."""


@dataclass
class Stack:
    """A prefill worker in its network namespace, and the gateway and the decode workers in the machine's."""

    link: netns.Link
    gateway: str
    admin: list[str]


def endpoint(worker: RunningProcess) -> str:
    listening = worker.events["listening"]
    return f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"


def begun(role: str, host: str, prefix: Sequence[str] = ()) -> AbstractContextManager[RunningProcess]:
    """Start a worker, without waiting until it is ready."""
    places = ("--listen", f"{host}:0", "--admin", f"{host}:0", "--connector", "tcp")
    engine = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--kv-memory", "4MiB")
    how = ("--load-policy", "always", "--log-level", "error")
    return running("worker", "--role", role, *engine, *how, *places, prefix=prefix)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    if why := netns.why_not():
        pytest.skip(why)
    with ExitStack() as resources:
        link = resources.enter_context(netns.joined())
        link.shape(FAST_MEGABITS)
        prefill = resources.enter_context(begun("prefill", link.far_address, link.prefix))
        decodes = [resources.enter_context(begun("decode", link.near_address)) for _ in range(2)]
        for worker in (prefill, *decodes):
            worker.wait_for("ready")
        endpoints = ["--prefill", endpoint(prefill)]
        for decode in decodes:
            endpoints += ["--decode", endpoint(decode)]
        addresses = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
        gateway = resources.enter_context(running("gateway", "--model", "tiny", *endpoints, *addresses))
        listening = gateway.wait_for("listening")
        admin = [str(worker.events["listening"]["admin"]) for worker in (prefill, *decodes)]
        yield Stack(link, str(listening["grpc"]), admin)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases.of_groups(*cases.LINKS)])
def test_fault(
    stack: Stack, case: Case, question_list: list[Question], one_engine: LLM, keep: Callable[[Row], None]
) -> None:
    note = ""

    def all_take_part(ended: Sequence[Ended]) -> bool:
        return len(workers_used(ended)) == len(stack.admin)

    @contextmanager
    def slow() -> Iterator[Felt]:
        stack.link.shape(SLOW_MEGABITS)
        try:
            yield lambda: True
        finally:
            stack.link.shape(FAST_MEGABITS)

    @contextmanager
    def down() -> Iterator[Felt]:
        stack.link.down()
        try:
            yield lambda: True
        finally:
            stack.link.up()

    @contextmanager
    def lossy() -> Iterator[Felt]:
        stack.link.lose_everything()
        try:
            yield lambda: True
        finally:
            stack.link.shape(FAST_MEGABITS)

    fault = slow if "slower" in case.fault else down if "down" in case.fault else lossy
    if fault is slow:
        note = compare_first_tokens(stack, one_engine)
    row = undergo(
        case, fault, gateway=stack.gateway, admin=stack.admin, question_list=question_list, is_normal=all_take_part
    )
    keep(replace(row, note=note))


def compare_first_tokens(stack: Stack, one_engine: LLM) -> str:
    """Check that first tokens do not wait for the transfer of KV over the slow link; return a sentence with
    both times.
    """
    rng = random.Random(960)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    timed = [
        answered(one_engine, [rng.randrange(199) for _ in range(PROMPT_TOKENS)], sampling)
        for _ in range(2 * NUM_TIMED + 2)
    ]
    asyncio.run(first_tokens(stack.gateway, timed[2 * NUM_TIMED :]))  # opens all connections
    fast = statistics.median(asyncio.run(first_tokens(stack.gateway, timed[:NUM_TIMED])))
    stack.link.shape(SLOW_MEGABITS)
    try:
        slow = statistics.median(asyncio.run(first_tokens(stack.gateway, timed[NUM_TIMED : 2 * NUM_TIMED])))
    finally:
        stack.link.shape(FAST_MEGABITS)
    kv_seconds = PROMPT_TOKENS // 16 * BLOCK_BYTES * 8 / (SLOW_MEGABITS * 1e6)
    assert slow < kv_seconds / 2, f"first tokens took {slow:.2f} s; the KV alone takes {kv_seconds:.1f} s"
    return (
        f"First tokens of prompts of {PROMPT_TOKENS} tokens, median of {NUM_TIMED}: {fast * 1000:.0f} ms at "
        f"{FAST_MEGABITS:.0f} Mbit/s, {slow * 1000:.0f} ms at {SLOW_MEGABITS:.0f} Mbit/s, over which the prompt's KV "
        f"alone would take {kv_seconds * 1000:.0f} ms."
    )


async def first_tokens(gateway: str, question_list: Sequence[Question]) -> list[float]:
    """Return the seconds until each prompt's first token, one prompt after the other; check every token."""
    seconds: list[float] = []
    async with AsyncClient(gateway, timeout=WAIT_SECONDS) as client:
        for question in question_list:
            began, tokens = CLOCK.monotonic(), list[int]()
            async with aclosing(client.generate(question.prompt, question.sampling)) as chunks:
                async for chunk in chunks:
                    if not tokens and chunk.tokens:
                        seconds.append(CLOCK.monotonic() - began)
                    tokens += [token.token_id for token in chunk.tokens]
            assert tuple(tokens) == question.tokens
    return seconds
