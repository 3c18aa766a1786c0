"""Decode step benchmark: an engine with random weights in the shape of a large model, compared with its memory bound.

The whole step is measured: scheduling, input arrays, launches, sampling. A second row has the host time without waiting
for the device. Both are measured with and without CUDA graphs, in the same process.
"""

import statistics
from collections.abc import Iterator, Sequence

from harness.device.coded_rows import GROUP as CODED_GROUP
from harness.device.coded_rows import use_codes
from kvferry.bench.formulas.gpu_work import GpuRow, GpuTiming, Spec, row
from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.gpu.session import Session
from kvferry.bench.inference import Bench
from kvferry.core.clock import Clock
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.execute.gpu.runner import DeviceRunner
from kvferry.engine.offline.llm import LLM
from kvferry.kernels.coded_weights import CodeKind
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.shapes import shape_of

OP, HOST_OP = "decode_step", "decode_step_host"
GRAPHS, PLAIN = "graphs", "without graphs"
_BLOCK_TOKENS = 16
_WARM_UP_STEPS = 4


def decode_rows(
    session: Session,
    clock: Clock,
    *,
    model: str,
    batches: Sequence[int],
    context: int,
    steps: int,
    codes: CodeKind | None = None,
) -> Iterator[GpuRow]:
    """Measure decode steps for each batch size, with and without CUDA graphs.

    Args:
        session: the device and its rates.
        clock: clock of the measurement.
        model: a name in `model.shapes.SHAPES`.
        batches: batch sizes.
        context: tokens of each prompt; sequences grow during the measurement.
        steps: number of measured steps.
        codes: type of the weights of the projections, which are then random codes; default: 16-bit weights.

    Raises:
        UnknownModel: `model` is unknown.
    """
    blocks = max(batches) * (2 + (context + steps) // _BLOCK_TOKENS)
    dtype = str(session.dtype).removeprefix("torch.")
    shape = KvLayout.of(shape_of(model), block_tokens=_BLOCK_TOKENS, dtype=dtype)
    llm = LLM(
        model,
        device=session.device.type,
        load_format="dummy",
        dtype=dtype,
        kernels="triton",
        kv_memory=blocks * shape.block_bytes,
        block_tokens=_BLOCK_TOKENS,
        limits=SchedulerLimits(max_mixed_tokens=2048, max_num_seqs=max(batches)),  # prefill is not measured
    )
    title = model if codes is None else f"{model} {codes.value}"
    if codes is not None:
        use_codes(llm.model, codes, group=CODED_GROUP if shape_of(model).hidden_size >= CODED_GROUP else 32)
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
            bench.steps(batch, (context, _WARM_UP_STEPS))  # compiles kernels
            timed = bench.steps(batch, (context, steps + 1))
            work = KernelWork(
                round(statistics.median(each.num_bytes for _, each in timed)),
                round(statistics.median(each.flops for _, each in timed)),
            )
            seconds = [taken for taken, _ in timed]
            found = [(OP, work, seconds)]
            if waits:
                own = [taken - waited for taken, waited in zip(seconds, waits[-len(seconds) :], strict=True)]
                found.append((HOST_OP, KernelWork(0), own))
            for op, needed, taken in found:
                yield row(
                    session.about,
                    Spec.of(f"{op} {title}", batch=batch, context=context),
                    needed,
                    GpuTiming.of(taken),
                    session.rates,
                    dtype=dtype,
                    kernels="triton",
                    launch=launch,
                )
