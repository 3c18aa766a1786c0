"""Workers and gateways that exit, hang, or lose their clients, for each connector."""

import asyncio
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import psutil
import pytest
from harness.faults import cases
from harness.faults.cases import Case
from harness.faults.traffic import Ended, Question, ask
from harness.faults.trial import Felt, Row, undergo, workers_used
from harness.servers.processes import RunningProcess, running

from kvferry.client import AsyncClient

pytestmark = pytest.mark.long

WAIT_SECONDS = 30.0
NUM_LEAVING = 50
FLAGS = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--load-policy", "always", "--log-level", "error")
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
Fault = Callable[["Stack", Sequence[Question]], AbstractContextManager[Felt]]


@dataclass
class Stack:
    """A running `kvferry up` with one prefill worker and two decode workers."""

    process: RunningProcess
    admin: list[str]
    gateway: str


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    flags = (*FLAGS, *ADDRESSES, "--kv-memory", "2MiB", "--decode", "2", "--connector", request.param)
    with running("up", *flags) as process:
        ready = process.wait_for("ready")
        admin = ready["workers"]
        assert isinstance(admin, dict)
        yield Stack(process, list(admin.values()), str(ready["grpc"]))
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("stack", "case"),
    [pytest.param(c.group, c, id=c.name) for c in cases.of_groups(*cases.CONNECTORS)],
    indirect=["stack"],
    scope="module",
)
def test_fault(stack: Stack, case: Case, question_list: list[Question], keep: Callable[[Row], None]) -> None:
    fault = next(fault for words, fault in FAULTS.items() if case.fault.startswith(words))

    def all_take_part(ended: Sequence[Ended]) -> bool:
        return len(workers_used(ended)) == len(stack.admin)

    keep(
        undergo(
            case,
            lambda: fault(stack, question_list),
            gateway=stack.gateway,
            admin=stack.admin,
            question_list=question_list,
            is_normal=all_take_part,
        )
    )


def at_once() -> bool:
    """Return `True`: the operating system applies the fault at once, so there is no log line to wait for."""
    return True


def kill(*roles: str, most: int = 8) -> Fault:
    @contextmanager
    def fault(stack: Stack, _: Sequence[Question]) -> Iterator[Felt]:
        victims = [victim for role in roles for victim in stack.process.children(role)[:most]]
        assert len(victims) >= len(roles)
        for victim in victims:
            victim.kill()
        psutil.wait_procs(victims, timeout=WAIT_SECONDS)
        yield at_once

    return fault


def freeze(role: str, most: int = 8) -> Fault:
    @contextmanager
    def fault(stack: Stack, _: Sequence[Question]) -> Iterator[Felt]:
        with ExitStack() as afterwards:
            for victim in stack.process.children(role)[:most]:
                afterwards.callback(victim.send_signal, signal.SIGCONT)
                victim.send_signal(signal.SIGSTOP)
            yield at_once

    return fault


@contextmanager
def kill_while_streams_are_left(stack: Stack, question_list: Sequence[Question]) -> Iterator[Felt]:
    """Start 50 streams and leave each after a random number of tokens; kill the prefill worker when the first
    is left.
    """
    (victim,) = stack.process.children("prefill")

    async def leave_all() -> list[Ended]:
        rng = random.Random(50)
        async with AsyncClient(stack.gateway, timeout=WAIT_SECONDS * 4) as client:

            async def one() -> Ended:
                end = await ask(client, rng.choice(question_list), leaves_after=rng.randrange(6))
                if victim.is_running():
                    victim.kill()
                return end

            return await asyncio.gather(*(one() for _ in range(NUM_LEAVING)))

    left = asyncio.run(leave_all())
    assert [end for end in left if not end.is_right] == []
    yield lambda: not victim.is_running()


FAULTS: dict[str, Fault] = {
    "P is killed while": kill_while_streams_are_left,
    "P is killed": kill("prefill"),
    "a D of two is killed": kill("decode", most=1),
    "P and both D are killed": kill("prefill", "decode"),
    "the gateway is killed": kill("gateway"),
    "P is frozen": freeze("prefill"),
    "a D of two is frozen": freeze("decode", most=1),
    "both D are frozen": freeze("decode"),
    "the gateway is frozen": freeze("gateway"),
}
