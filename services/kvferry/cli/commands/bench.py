"""`kvferry bench`: repeatable measurements, each compared with a bound that is measured in the same run."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.amounts import duration_of
from kvferry.cli.commands.bench_serve import command as serve
from kvferry.cli.engine_settings import engine_settings
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, reported, with_settings
from kvferry.cli.output_files import JSON_FILE, OUTPUT_FILE, write_json
from kvferry.core.clock import SystemClock
from kvferry.core.errors import KvferryError, UsageError
from kvferry.core.process.cores import usable_cores
from kvferry.core.settings import processes as settings
from kvferry.core.settings.parsers import size_bytes

if TYPE_CHECKING:
    from kvferry.bench.inference import Bench
    from kvferry.bench.inference import BenchmarkRun as InferenceRun
    from kvferry.bench.transfer import TransferRun


_MIN_MS = 0.005
"""Minimum duration in milliseconds of a step's phases that are printed."""


@click.group("bench")
def command() -> None:
    """Measure performance and compare it with a bound measured in the same run.

    \b
      kvferry bench latency                        one stream and small batches, with an engine in this process
      kvferry bench throughput --weights bfloat16  64 concurrent requests of mixed sizes
      kvferry bench kernels --json rows.json       one matrix product at a time; on a GPU one kernel at a time
      kvferry bench latency --load-format dummy --model llama-3.1-8b --device cuda --batch 64 --kv-memory 16GiB
      kvferry bench transfer                       every transport, 1 to 64 blocks of the default model
      kvferry bench transfer --transport shm --transport tcp --json rows.json
      kvferry bench serve --rate 4 --requests 200  an OpenAI-compatible server, under a workload
    """


def _engine_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that the `latency` and `throughput` benchmarks share."""
    for option in reversed(
        (
            click.option(
                "--rounds",
                default=5,
                show_default=True,
                type=click.IntRange(1, 1000),
                help="Number of measured rounds.",
            ),
            JSON_FILE,
            with_settings(settings.BENCH),
        )
    ):
        function = option(function)
    return function


@command.command("latency", cls=SettingsCommand)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 1024), help="Batch size; may be repeated.")
@click.option(
    "--input-tokens", default=128, show_default=True, type=click.IntRange(1, 1 << 20), help="Tokens per prompt."
)
@click.option(
    "--output-tokens",
    default=64,
    show_default=True,
    type=click.IntRange(2, 1 << 16),
    help="Tokens generated per prompt.",
)
@click.option("--phases", is_flag=True, help="Also measure the phases of a step; compiled kernels only.")
@_engine_options
def latency(
    values: Values,
    *,
    batches: tuple[int, ...],
    input_tokens: int,
    output_tokens: int,
    phases: bool,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Measure batches of simultaneous requests: time to first token, inter-token latency, tokens per second."""
    bench = _bench(values)
    runs = []
    for batch in batches or (1, 8):
        with _progress(f"batch {batch}", rounds + 1) as advance:
            run = bench.latency(batch, (input_tokens, output_tokens), rounds, advance)
        click.echo(_run_line(run))
        if phases:
            click.echo(
                "  all threads, ms per step: " + _phases_line(bench.phases((input_tokens, output_tokens), batch))
            )
        runs.append(run)
    _report(bench, runs, json_file)


@command.command("throughput", cls=SettingsCommand)
@click.option(
    "--requests",
    default=64,
    show_default=True,
    type=click.IntRange(1, 4096),
    help="Number of requests, all started simultaneously.",
)
@_engine_options
def throughput(values: Values, *, requests: int, rounds: int, json_file: Path | None) -> None:
    """Measure output tokens per second for a fixed set of requests with 32 to 512 input and 16 to 128 output tokens."""
    from kvferry.bench.inference import mixed_shapes

    bench = _bench(values)
    with _progress(f"{requests} requests", rounds + 1) as advance:
        run = bench.throughput(mixed_shapes(requests), rounds, advance)
    click.echo(_run_line(run))
    _report(bench, [run], json_file)


@command.command("kernels", cls=SettingsCommand)
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(1, 10_000), help="Rounds per product; CPU only."
)
@JSON_FILE
@click.option(
    "--csv",
    "csv_file",
    type=OUTPUT_FILE,
    help="Append the rows to a CSV file; GPU only.",
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    metavar="NAME",
    help="Operation to measure; may be repeated; default: all. GPU only.",
)
@click.option("--tune", is_flag=True, help="First try launch choices and write the fastest to launch.toml; GPU only.")
@with_settings(settings.BENCH)
def kernels(
    values: Values, *, rounds: int, json_file: Path | None, csv_file: Path | None, ops: tuple[str, ...], tune: bool
) -> None:
    """Measure each kernel separately and compare it with its bound.

    On a CPU: matrix products in the model's shapes, for every weight format and number of rows. On a GPU: every
    operation of the Triton kernels in the shapes of Llama 3.1 8B, compared with torch and, if installed, flash-attn,
    flashinfer and liger-kernel.
    """
    from kvferry.engine.execute.tensors.device import choose_device

    device = choose_device(values["device"], kernels=values["kernels"])
    if device == "cuda":
        import torch

        from kvferry.bench.gpu import kernels
        from kvferry.bench.gpu.session import on_gpu
        from kvferry.bench.rows import as_row

        session = on_gpu(torch.device(device), SystemClock(), say=lambda text: click.echo(f"  {text}", err=True))
        found = kernels.run(session, ops, click.echo, tune=tune, csv_file=csv_file)
        write_json(json_file, {"rows": [as_row(row) for row in found]})
        return
    for flag, is_given in (("--tune", tune), ("--csv", csv_file is not None), ("--op", bool(ops))):
        if is_given:
            raise UsageError(
                f"{flag} is only supported with GPU kernels; omit it, or use --device cuda on a machine with a GPU",
                field=flag.removeprefix("--"),
            )
    _products(values, rounds, json_file)


def _products(values: Values, rounds: int, json_file: Path | None) -> None:
    from kvferry.bench import products
    from kvferry.bench.rows import as_row
    from kvferry.engine.execute.dtypes.compute_dtype import choose_dtype
    from kvferry.engine.execute.models.build import level_of, resolve_kernels
    from kvferry.model.shapes import shape_of
    from kvferry.model.source import open_model

    is_dummy = values["load_format"] == "dummy"
    config = shape_of(values["model"]) if is_dummy else open_model(values["model"]).config
    dtype = choose_dtype(values["dtype"], config, kernels=values["kernels"])
    level = level_of(resolve_kernels(values["kernels"], config, dtype))
    if not level:
        raise UsageError("only compiled kernels can be measured; they are disabled here", field="kernels")
    threads, clock = _threads(values), SystemClock()
    rows = products.measure(config, level, threads, rounds, clock)
    for row in rows:
        click.echo(
            f"{row.op:<8} {row.shape:<18} {row.dtype:<9} {row.ms:9.4f} ms  {row.bytes / row.ms / 1e6:7.1f} GB/s "
            f"{row.flops / row.ms / 1e6:7.0f} GFLOP/s  {100 * row.share_of_bound:5.1f} % of the bound"
        )
    write_json(json_file, {"rows": [as_row(row) for row in rows]})


def _bench(values: Values) -> "Bench":
    from kvferry.bench.inference import Bench
    from kvferry.engine.offline.llm import LLM

    if sys.stderr.isatty():
        click.echo("  loading the model ...", err=True)
    threads = _threads(values)
    llm = LLM.of(engine_settings(values, threads=threads))
    click.echo(f"{llm.config.name}: {llm.model.kernels}, {threads} threads, KV {llm.dtype}")
    return Bench(llm, threads, SystemClock())


def _threads(values: Values) -> int:
    return values["threads"] or usable_cores()


def _report(bench: "Bench", runs: "list[InferenceRun]", json_file: Path | None) -> None:
    from kvferry.bench.inference import BenchmarkReport

    report = BenchmarkReport(tuple(runs), bench.machine())
    machine = report.machine
    click.echo(f"machine rates: {machine.read_gbps:.1f} GB/s read, {machine.gflops:.0f} GFLOP/s")
    write_json(json_file, report.as_json())


def _phases_line(milliseconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.2f}" for name, ms in milliseconds.items() if ms >= _MIN_MS)


def _run_line(run: "InferenceRun") -> str:
    return (
        f"batch {run.batch:<4} {run.input_tokens:>5} in {run.output_tokens:>4} out  "
        f"TTFT {run.ttft_ms:8.1f} ms  ITL {run.itl_ms.p50:6.2f} ms (p99 {run.itl_ms.p99:.2f})  "
        f"{run.tokens_per_second:7.1f} tokens/s ({run.least:.1f} to {run.most:.1f}), "
        f"{100 * run.share_of_bound:.1f} % of {run.bound_tokens_per_second:.0f}"
    )


@contextmanager
def _progress(label: str, length: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar during the `with` block if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with click.progressbar(length=length, label=f"  {label}", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


@command.command("transfer")
@click.option(
    "--transport",
    "names",
    multiple=True,
    metavar="NAME",
    help="Transport to measure; may be repeated; default: all available transports.",
)
@click.option(
    "--blocks", "counts", multiple=True, type=click.IntRange(1, 1 << 16), help="Blocks per read; may be repeated."
)
@click.option("--block-size", default="360KiB", show_default=True, help="Block size.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1, 10_000), help="Rounds per size.")
@JSON_FILE
def transfer(names: tuple[str, ...], counts: tuple[int, ...], block_size: str, rounds: int, json_file: Path) -> None:
    """Measure KV page transfers between two processes by transport, size and scatter.

    Each row is compared with a simpler transfer of as many bytes, measured in the same rounds: a copy in memory by one
    thread for shm and memory, a TCP stream over loopback for tcp, bare NIXL for nixl, tcp for tcp-encrypted. Reads of a
    memory that is in the processor's cache, or by several threads, may be faster than that.
    """
    from kvferry.bench import transfer as bench
    from kvferry.bench.rows import as_row

    with reported():
        block_bytes = _size(block_size)
        for name in names:
            if name not in bench.names():
                raise UsageError(f"unknown transport {name!r}; use one of {', '.join(bench.names())}")
        runs: list[bench.TransferRun] = []
        for name in names or bench.names():
            for count in counts or (1, 8, 64):
                for scattered in (False, True) if count > 1 else (False,):
                    if sys.stderr.isatty():
                        click.echo(f"  {name}: {count} blocks{', scattered' if scattered else ''} ...", err=True)
                    try:
                        run = bench.measure(
                            name, count, block_bytes, scattered=scattered, rounds=rounds, clock=SystemClock()
                        )
                    except KvferryError as error:
                        if names:
                            raise
                        click.echo(f"{name}: skipped: {error.message}", err=True)
                        continue
                    if not runs:
                        click.echo(_HEADER)
                    runs.append(run)
                    click.echo(_line(run))
        found = {"summary": bench.summary(runs), "runs": [as_row(run) for run in runs]}
        write_json(json_file, found)


_HEADER = f"{'transport':<13} {'blocks':>6} {'pages':<9} {'median':>10} {'least':>10} {'most':>10} {'rate':>11}"


def _line(run: "TransferRun") -> str:
    pages = "scattered" if run.is_scattered else "together"
    times = " ".join(f"{duration_of(ms):>10}" for ms in (run.ms, run.ms_least, run.ms_most))
    ratio = f"{run.share_of_bound:.2f} times the {run.bound_gbps:.2f} GB/s of {run.bound}"
    return f"{run.transport:<13} {run.num_blocks:>6} {pages:<9} {times} {run.gbps:>6.2f} GB/s   {ratio}"


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise UsageError(f"--block-size {text!r} is not a size ({error}); use for example 360KiB or 2MiB") from error


command.add_command(serve)
