"""`kvferry bench`: measurements that can be repeated, each against a bound that is measured in the same run."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli import settings
from kvferry.cli.options import Values, print_json, reported, with_settings
from kvferry.core.clock import SystemClock
from kvferry.core.cores import usable_cores
from kvferry.core.errors import KvferryError, UsageError
from kvferry.core.settings import size_bytes

if TYPE_CHECKING:
    from kvferry.bench.inference import Bench
    from kvferry.bench.inference import Run as InferenceRun
    from kvferry.bench.transfer import Run


_LEAST_MS = 0.005
"""Of a phase that is worth a word."""


@click.group("bench")
def command() -> None:
    """Measure, and say how near to the bound it is.

    \b
      kvferry bench latency                        one stream and a few, on one engine in this process
      kvferry bench throughput --weights bfloat16  64 requests of mixed sizes at once
      kvferry bench kernels --json rows.json       one matrix product at a time; on a GPU one kernel at a time
      kvferry bench latency --load-format dummy --model llama-3.1-8b --device cuda --batch 64 --kv-memory 16GiB
      kvferry bench transfer                       every transport, 1 to 64 blocks of the default model
      kvferry bench transfer --transport shm --transport tcp --json rows.json
    """


def _engine_options(function: Callable[..., None]) -> Callable[..., None]:
    """What both benchmarks of an engine take."""
    for option in reversed(
        (
            click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000), help="That count."),
            click.option(
                "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the runs."
            ),
            with_settings(settings.BENCH),
        )
    ):
        function = option(function)
    return function


@command.command("latency")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 1024), help="Requests together; repeat.")
@click.option("--input-tokens", default=128, show_default=True, type=click.IntRange(1, 1 << 20), help="Of each prompt.")
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(2, 1 << 16), help="Of each answer.")
@click.option("--phases", is_flag=True, help="Also where a step's time went; compiled kernels only.")
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
    """Requests that start together: time to the first token, between tokens, tokens a second."""
    bench = _bench(values)
    runs = []
    for batch in batches or (1, 8):
        with _progress(f"batch {batch}", rounds + 1) as advance:
            run = bench.latency(batch, (input_tokens, output_tokens), rounds, advance)
        click.echo(_run_line(run))
        if phases:
            click.echo("  all threads, ms a step: " + _phases_line(bench.phases((input_tokens, output_tokens), batch)))
        runs.append(run)
    _report(bench, runs, json_file)


@command.command("throughput")
@click.option("--requests", default=64, show_default=True, type=click.IntRange(1, 4096), help="All given at once.")
@_engine_options
def throughput(values: Values, *, requests: int, rounds: int, json_file: Path | None) -> None:
    """Requests of 32 to 512 tokens in and 16 to 128 out, the same every time: output tokens a second."""
    from kvferry.bench.inference import mixed_shapes

    bench = _bench(values)
    with _progress(f"{requests} requests", rounds + 1) as advance:
        run = bench.throughput(mixed_shapes(requests), rounds, advance)
    click.echo(_run_line(run))
    _report(bench, [run], json_file)


@command.command("kernels")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1, 10_000), help="Of each product; CPU.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Append the rows; GPU.")
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Only these operations; repeat. GPU.")
@click.option("--tune", is_flag=True, help="Try launch choices first and write the winners to launch.toml; GPU.")
@with_settings(settings.BENCH)
def kernels(
    values: Values, *, rounds: int, json_file: Path | None, csv_file: Path | None, ops: tuple[str, ...], tune: bool
) -> None:
    """What computes, one piece at a time, against its bound.

    On a CPU: matrix products of the model's shapes, in every form of weights, by number of rows. On a GPU: every
    operation of the Triton kernels in the shapes of Llama 3.1 8B, beside torch and what else is installed of
    flash-attn, flashinfer and liger-kernel.
    """
    from kvferry.engine.device import choose_device

    device = choose_device(values["device"], kernels=values["kernels"])
    if device == "cuda":
        import torch

        from kvferry.bench.gpu import kernels
        from kvferry.bench.gpu.session import on_gpu
        from kvferry.bench.rows import as_row

        session = on_gpu(torch.device(device), SystemClock(), say=lambda text: click.echo(f"  {text}", err=True))
        found = kernels.run(session, ops, click.echo, tune=tune, csv_file=csv_file)
        _write(json_file, {"rows": [as_row(row) for row in found]})
        return
    for flag, is_given in (("--tune", tune), ("--csv", csv_file is not None), ("--op", bool(ops))):
        if is_given:
            raise UsageError(
                f"{flag} is for kernels of GPUs, and these are products on the CPU; leave it out, or take --device cuda"
                " where there is a GPU",
                field=flag.removeprefix("--"),
            )
    _products(values, rounds, json_file)


def _products(values: Values, rounds: int, json_file: Path | None) -> None:
    from kvferry.bench import products
    from kvferry.bench.rows import as_row
    from kvferry.engine.compute_dtype import choose_dtype
    from kvferry.engine.models.build import level_of, resolve_kernels
    from kvferry.model.shapes import shape_of
    from kvferry.model.source import open_model

    is_dummy = values["load_format"] == "dummy"
    config = shape_of(values["model"]) if is_dummy else open_model(values["model"]).config
    dtype = choose_dtype(values["dtype"], config, kernels=values["kernels"])
    level = level_of(resolve_kernels(values["kernels"], config, dtype))
    if not level:
        raise UsageError("only compiled kernels are measured one by one, and they are not in use here", field="kernels")
    threads, clock = _threads(values), SystemClock()
    rows = products.measure(config, level, threads, rounds, clock)
    for row in rows:
        click.echo(
            f"{row.op:<8} {row.shape:<18} {row.dtype:<9} {row.ms:9.4f} ms  {row.bytes / row.ms / 1e6:7.1f} GB/s "
            f"{row.flops / row.ms / 1e6:7.0f} GFLOP/s  {100 * row.share_of_bound:5.1f} % of the bound"
        )
    _write(json_file, {"rows": [as_row(row) for row in rows]})


def _bench(values: Values) -> "Bench":
    from kvferry.bench.inference import Bench
    from kvferry.engine.llm import LLM

    if sys.stderr.isatty():
        click.echo("  loading the model ...", err=True)
    threads = _threads(values)
    llm = LLM(
        values["model"],
        device=values["device"],
        load_format=values["load_format"],
        dtype=values["dtype"],
        weights=values["weights"],
        numerics=values["numerics"],
        kernels=values["kernels"],
        cuda_graphs=values["cuda_graphs"],
        kv_bytes=values["kv_memory"],
        block_tokens=values["block_tokens"],
        threads=threads,
    )
    click.echo(f"{llm.config.name}: {llm.runner.model.kernels}, {threads} threads, KV {llm.dtype}")
    return Bench(llm, threads, SystemClock())


def _threads(values: Values) -> int:
    return values["threads"] or usable_cores()


def _report(bench: "Bench", runs: "list[InferenceRun]", json_file: Path | None) -> None:
    from kvferry.bench.inference import Report

    report = Report(tuple(runs), bench.machine())
    machine = report.machine
    click.echo(f"beside it: {machine.read_gbps:.1f} GB/s read, {machine.gflops:.0f} GFLOP/s")
    _write(json_file, report.as_json())


def _phases_line(milliseconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.2f}" for name, ms in milliseconds.items() if ms >= _LEAST_MS)


def _write(file: Path | None, found: Mapping[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def _run_line(run: "InferenceRun") -> str:
    return (
        f"batch {run.batch:<4} {run.input_tokens:>5} in {run.output_tokens:>4} out  "
        f"first token {run.ttft_ms:8.1f} ms  between {run.itl_ms.p50:6.2f} ms (p99 {run.itl_ms.p99:.2f})  "
        f"{run.tokens_per_second:7.1f} tokens/s ({run.least:.1f} to {run.most:.1f}), "
        f"{100 * run.share_of_bound:.1f} % of {run.bound_tokens_per_second:.0f}"
    )


@contextmanager
def _progress(label: str, length: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with click.progressbar(length=length, label=f"  {label}", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


@command.command("transfer")
@click.option("--transport", "names", multiple=True, metavar="NAME", help="Only these; default: all that run here.")
@click.option("--blocks", "counts", multiple=True, type=click.IntRange(1, 1 << 16), help="Blocks a read; repeat.")
@click.option("--block-size", default="360KiB", show_default=True, help="Bytes of a block.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1, 10_000), help="Rounds of each size.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write summary and rows.")
def transfer(names: tuple[str, ...], counts: tuple[int, ...], block_size: str, rounds: int, json_file: Path) -> None:
    """Pages from one process to another, by transport, size and scatter: against memcpy, loopback, bare NIXL."""
    from kvferry.bench import transfer as bench
    from kvferry.bench.rows import as_row
    from kvferry.kv import registry

    with reported():
        block_bytes = _size(block_size)
        for name in names:
            if name not in registry.names():
                raise UsageError(f"there is no transport {name!r}; known are {', '.join(registry.names())}")
        runs: list[bench.Run] = []
        for name in names or registry.names():
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
                        click.echo(f"{name}: left out: {error.message}", err=True)
                        continue
                    runs.append(run)
                    click.echo(_line(run))
        found = {"summary": bench.summary(runs), "runs": [as_row(run) for run in runs]}
        _write(json_file, found)
        print_json(found["summary"])


def _line(run: "Run") -> str:
    scatter = "scattered" if run.is_scattered else "together"
    return (
        f"{run.transport:<7} {run.num_blocks:>4} blocks {scatter:<9} {run.ms:9.3f} ms "
        f"({run.ms_least:.3f} to {run.ms_most:.3f})  {run.gbps:6.2f} GB/s  "
        f"{100 * run.share_of_bound:5.1f} % of {run.bound_gbps:.2f}"
    )


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise UsageError(f"--block-size {text!r} is not a size ({error}); write 360KiB or 2MiB") from error
