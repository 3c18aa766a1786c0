"""Runs a target: mutations of its seeds for some time, or the files of its corpus.

    guided     with atheris (libFuzzer): inputs that reach new code are kept and changed further
    unguided   without it, and for servers: valid inputs and earlier findings are changed

Each run has a limit of CPU time and the process one of memory. A finding ends the run and is written to the corpus.
"""

import hashlib
import importlib.util
import inspect
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType, FunctionType, ModuleType
from typing import NoReturn

from harness.fuzz.adapters import TARGETS as ADAPTERS
from harness.fuzz.files import TARGETS as FILES
from harness.fuzz.heads import TARGETS as HEADS
from harness.fuzz.servers import TARGETS as SERVERS
from harness.fuzz.target import CORPUS, MAX_MEMORY_BYTES, MAX_SECONDS, Run, Target
from harness.fuzz.wires import TARGETS as WIRES
from kvferry.core.clock import SystemClock

TARGETS = {target.name: target for target in (*FILES, *ADAPTERS, *HEADS, *WIRES, *SERVERS)}
_MUTATIONS_OF_ONE = 4
_POOL = 400
_GUIDED = ("kvferry.model", "kvferry.kv")


class TooSlow(BaseException):
    """The error of a run that takes too long. Not an `Exception`, so that handlers in the target do not catch it."""


def replay(target: Target, inputs: list[bytes]) -> None:
    """Run inputs once each, within the limits; the first finding raises."""
    with target.opened() as run:
        for data in inputs:
            with _time_limit(target):
                run(data)


def drive(target: Target, seconds: float, seed: int) -> int:
    """Run mutations for `seconds`; return the number of runs. A failing input is written to the corpus, and its error
    is raised."""
    random, clock = Random(seed), SystemClock()
    inputs = target.seeds() + [path.read_bytes() for path in target.findings()]
    num_runs = 0
    with target.opened() as run:
        _limit_memory()
        for data in inputs:
            _run_one(target, run, data)
        deadline = clock.monotonic() + seconds
        while clock.monotonic() < deadline:
            data = random.choice(inputs)
            for _ in range(random.randrange(1, _MUTATIONS_OF_ONE)):
                data = target.mutate(data, random)
            _run_one(target, run, data)
            num_runs += 1
            if len(inputs) < _POOL and random.random() < 0.01:
                inputs.append(data)
    return num_runs


def drive_guided(target: Target, seconds: float, seed: int) -> NoReturn:
    """Run mutations for `seconds`, guided by coverage; ends the process."""
    import atheris

    def mutated(data: bytes, most: int, number: int) -> bytes:
        if number % 4 == 0:
            return bytes(atheris.Mutate(data, most))
        return target.mutate(bytes(data), Random(number))[:most]

    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"kvferry-fuzz-{target.name}-{os.getpid()}")
    os.makedirs(folder)
    for number, data in enumerate(target.seeds() + [path.read_bytes() for path in target.findings()]):
        with open(os.path.join(folder, str(number)), "wb") as file:
            file.write(data)
    opened = target.opened()
    run = opened.__enter__()
    _instrument()
    _limit_memory()
    options = [
        f"-max_total_time={int(seconds)}",
        f"-seed={seed}",
        "-max_len=65536",
        "-len_control=0",
        "-rss_limit_mb=0",
    ]
    silent = ["-verbosity=0", f"-artifact_prefix={folder}/", "-timeout=60", "-close_fd_mask=0"]
    atheris.Setup(
        [target.name, folder, *options, *silent], lambda data: _run_one(target, run, data), custom_mutator=mutated
    )
    atheris.Fuzz()
    sys.exit(0)


def can_guide(target: Target) -> bool:
    """Return whether atheris is installed and the target runs in this process."""
    return not target.is_server and importlib.util.find_spec("atheris") is not None


def _run_one(target: Target, run: Run, data: bytes) -> None:
    try:
        with _time_limit(target):
            run(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        path = CORPUS / target.name / hashlib.sha256(data).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if target.is_server:
            raise AssertionError(f"FINDING of target {target.name}: {path}") from error  # ends the servers too
        traceback.print_exc()
        sys.stderr.write(f"FINDING of target {target.name}: {path}\n")
        sys.stderr.flush()
        os._exit(77)  # otherwise atheris would continue


@contextmanager
def _time_limit(target: Target) -> Iterator[None]:
    """Raise `TooSlow` in a run that takes too much CPU time. Inputs of servers have timeouts instead."""
    if target.is_server:
        yield
        return
    signal.signal(signal.SIGVTALRM, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"a run took more than {MAX_SECONDS:g} s")


def _limit_memory() -> None:
    """Limit the process's memory to its present size plus `MAX_MEMORY_BYTES`."""
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + MAX_MEMORY_BYTES, hard))


def _instrument() -> None:
    """Instrument all functions of the packages that read external input with atheris."""
    import atheris

    for name, module in list(sys.modules.items()):
        if name.startswith(_GUIDED):
            for function in _functions(module):
                atheris.instrument_func(function)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            yield value
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            yield from (part for part in vars(value).values() if inspect.isfunction(part))
