"""Decode steps of an engine over random weights of a large model's shape, against the bytes that a step must read.

The whole step counts, as a client waits for it: scheduler, arrays, launches, draws on the host.
"""

import statistics
from collections.abc import Iterator, Sequence

from kvferry.bench.gpu.session import Session
from kvferry.bench.gpu.work import Row, Spec, Timing, row
from kvferry.bench.inference import Bench
from kvferry.bench.work import Work
from kvferry.core.clock import Clock
from kvferry.engine.cache import PageShape
from kvferry.engine.llm import LLM
from kvferry.engine.room import SchedulerLimits
from kvferry.model.shapes import shape_of

OP = "decode_step"
_BLOCK_TOKENS = 16
_WARM_UP_STEPS = 4


def decode_rows(
    session: Session, clock: Clock, *, model: str, batches: Sequence[int], context: int, steps: int
) -> Iterator[Row]:
    """A row for each batch.

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
    bench = Bench(llm, 1, clock)
    for batch in batches:
        bench.steps(batch, (context, _WARM_UP_STEPS))  # compiles
        timed = bench.steps(batch, (context, steps + 1))
        work = Work(
            round(statistics.median(each.num_bytes for _, each in timed)),
            round(statistics.median(each.flops for _, each in timed)),
        )
        spec = Spec.of(f"{OP} {model}", batch=batch, context=context)
        yield row(
            session.about,
            spec,
            work,
            Timing.of([seconds for seconds, _ in timed]),
            session.rates,
            dtype=dtype,
            kernels="triton",
            launch="without graphs",
        )
