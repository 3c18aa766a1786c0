"""Stop signals: several at once are one stop, and a later one ends the process at once."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvferry.core.process import stop_signals as module
from kvferry.core.process.stop_signals import stop_signals

_PROGRAM = """
import asyncio, sys
from kvferry.core.process import stop_signals as module
module.SAME_STOP_SECONDS = float(sys.argv[1])

async def main():
    stop = asyncio.Event()
    with module.stop_signals(asyncio.get_running_loop(), stop.set):
        print("ready", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("drained", flush=True)

asyncio.run(main())
"""


async def test_signals_at_once_are_one_stop_and_a_later_one_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAME_STOP_SECONDS", 0.05)
    seen: list[str] = []
    again = asyncio.Event()

    def later() -> None:
        seen.append("again")
        again.set()

    with stop_signals(asyncio.get_running_loop(), lambda: seen.append("stop"), on_again=later):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        async with asyncio.timeout(20):
            while not again.is_set():  # until the time has passed, signals have no effect
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0)
        assert seen[0] == "stop"
        assert seen.count("stop") == 1
    os.kill(os.getpid(), signal.SIGTERM)  # has no effect


@contextmanager
def program(same_stop_seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Run a program that has received its first signal."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(same_stop_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        yield process


def test_a_signal_right_after_the_first_does_not_end_the_drain() -> None:
    with program(same_stop_seconds=60.0) as process:
        process.send_signal(signal.SIGTERM)
        assert process.communicate("\n", timeout=20)[0] == "drained\n"
        assert process.returncode == 0


def test_a_later_signal_ends_the_process() -> None:
    with program(same_stop_seconds=0.0) as process:
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        assert process.returncode == -signal.SIGTERM
