"""Threads that run compiled code end before the interpreter, so that the process keeps its exit status."""

import subprocess
import sys

_IN_A_STEP = """
import asyncio
from kvferry.engine import AsyncLLM, SamplingParams

async def main():
    llm = await AsyncLLM.open("tiny", dtype="float32", kv_memory=16 << 20, threads=1)
    parts = llm.generate("hello", SamplingParams(max_tokens=1500, ignore_eos=True))
    await anext(parts)
    globals()["kept"] = llm, parts
    raise SystemExit(3)

asyncio.run(main())
"""
_BUSY = """
import sys, threading
from kvferry.core.process.exit_threads import start_thread

stopped = threading.Event()

def run():
    stopped.wait()
    sys.stdout.write("ended")

start_thread(run, "busy", stopped.set)
start_thread(lambda: None, "short", lambda: sys.stdout.write("not reached")).join()
"""


def exit_of(program: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_threads_are_stopped_and_joined_at_exit_unless_they_have_ended() -> None:
    assert exit_of(_BUSY) == (0, "ended")


def test_a_program_that_exits_during_a_step_keeps_its_exit_status() -> None:
    assert exit_of(_IN_A_STEP) == (3, "")
