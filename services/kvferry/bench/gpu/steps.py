"""Decode steps of an engine over random weights of a large model's shape, against the bytes that a step must read.

The whole step counts, as a client waits for it: scheduler, arrays, launches, draws. Beside it a row says what the host
alone took of it, its waiting for the device left out. With captured steps and without, in one process.
"""

import statistics
from collections.abc import Iterator, Sequence

from kvferry.bench.gpu.session import Session
from kvferry.bench.gpu.work import Row, Spec, Timing, row
from kvferry.bench.inference import Bench
from kvferry.bench.work import Work
from kvferry.core.clock import Clock
from kvferry.engine.cache import PageShape
from kvferry.engine.gpu.runner import DeviceRunner
from kvferry.engine.llm import LLM
from kvferry.engine.room import SchedulerLimits
from kvferry.model.shapes import shape_of

OP, HOST_OP = "decode_step", "decode_step_host"
GRAPHS, PLAIN = "graphs", "without graphs"
_BLOCK_TOKENS = 16
_WARM_UP_STEPS = 4


def decode_rows(
    session: Session, clock: Clock, *, model: str, batches: Sequence[int], context: int, steps: int
) -> Iterator[Row]:
    """Rows of each batch, with graphs where there are any and without.

    Args:
        session: where.
        clock: what to measure with.
        model: a name of `model.shapes.SHAPES`.
        batches: requests together.
        context: tokens of each prompt; while steps are timed they become more.
        steps: that are timed.

    Raises:
        UnknownModel: there is no such shape.
    """
    blocks = max(batches) * (2 + (context + steps) // _BLOCK_TOKENS)
    dtype = str(session.dtype).removeprefix("torch.")
    shape = PageShape.of(shape_of(model), block_tokens=_BLOCK_TOKENS, dtype=dtype)
    llm = LLM(
        model,
        device=session.device.type,
        load_format="dummy",
        dtype=dtype,
        kernels="triton",
        kv_bytes=blocks * shape.block_bytes,
        block_tokens=_BLOCK_TOKENS,
        limits=SchedulerLimits(max_mixed_tokens=2048, max_sequences=max(batches)),  # prompts are not what is measured
    )
    bench, runner = Bench(llm, 1, clock), llm.runner
    launches: tuple[str, ...] = (PLAIN,)
    if isinstance(runner, DeviceRunner):
        runner.capture_all()
        launches = (GRAPHS, PLAIN)
    for batch in batches:
        for launch in launches:
            waits: list[float] = []
            if isinstance(runner, DeviceRunner):
                runner.replays, runner.watch_waits = launch == GRAPHS, waits.append
            bench.steps(batch, (context, _WARM_UP_STEPS))  # compiles
            timed = bench.steps(batch, (context, steps + 1))
            work = Work(
                round(statistics.median(each.num_bytes for _, each in timed)),
                round(statistics.median(each.flops for _, each in timed)),
            )
            seconds = [taken for taken, _ in timed]
            found = [(OP, work, seconds)]
            if waits:
                own = [taken - waited for taken, waited in zip(seconds, waits[-len(seconds) :], strict=True)]
                found.append((HOST_OP, Work(0), own))
            for op, needed, taken in found:
                yield row(
                    session.about,
                    Spec.of(f"{op} {model}", batch=batch, context=context),
                    needed,
                    Timing.of(taken),
                    session.rates,
                    dtype=dtype,
                    kernels="triton",
                    launch=launch,
                )
