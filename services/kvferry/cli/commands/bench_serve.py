"""`kvferry bench serve`: measures any OpenAI-compatible server under an open-loop workload."""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.bench.workload import arrivals as processes
from kvferry.bench.workload import requests as workloads
from kvferry.cli.amounts import counted
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import NumberRange, Values, with_settings
from kvferry.cli.output_files import JSON_FILE, OUTPUT_FILE, write_file, write_json
from kvferry.cli.server_url import ServerUrl
from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable, UsageError
from kvferry.core.process.cores import usable_cores
from kvferry.core.settings.setting import Setting

if TYPE_CHECKING:
    from kvferry.bench.workload.measures import MeasuredAnswer

_TRACE = "trace="
_LATE_MS = 100.0
_API_KEY = (Setting("api_key", "", "API key of the server.", is_secret=True),)
_SIZE = click.IntRange(1, 1 << 20)


@click.command("serve", cls=SettingsCommand)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL of the server.")
@click.option("--model", default="", help="Model name; default: the first model that the server lists.")
@click.option(
    "--arrivals",
    default=processes.POISSON,
    show_default=True,
    help=f"{', '.join(processes.PROCESSES)}, or trace=FILE: Mooncake's JSON lines or Azure's CSV.",
)
@click.option("--rate", default=math.inf, type=float, help="Mean requests per second; default: all at once.")
@click.option("--requests", "count", default=100, show_default=True, type=click.IntRange(1, workloads.MAX_REQUESTS))
@click.option("--workload", default=workloads.RANDOM, show_default=True, help=f"{', '.join(workloads.WORKLOADS)}.")
@click.option(
    "--input-tokens", default=512, show_default=True, type=_SIZE, help="Mean tokens of a prompt or of a turn."
)
@click.option("--output-tokens", default=128, show_default=True, type=_SIZE, help="Mean tokens of an answer.")
@click.option("--spread", default=0.0, help="Relative spread of both lengths, at least 0 and below 1.")
@click.option("--prefix-tokens", default=1024, show_default=True, type=_SIZE, help="shared-prefix: tokens of a prefix.")
@click.option("--prefixes", default=4, show_default=True, type=_SIZE, help="shared-prefix: number of prefixes.")
@click.option("--turns", default=4, show_default=True, type=_SIZE, help="multi-turn: turns of a conversation.")
@click.option("--turn-seconds", default=5.0, show_default=True, help="multi-turn: seconds between turns.")
@click.option("--burstiness", default=1.0, show_default=True, help="gamma: shape; below 1 is burstier than poisson.")
@click.option(
    "--burst-size", default=8, show_default=True, type=_SIZE, help="burst: number of requests sent simultaneously."
)
@click.option("--trace-speed", default=1.0, show_default=True, help="Factor by which the replay of a trace is sped up.")
@click.option(
    "--max-input-tokens", default=1 << 20, type=_SIZE, help="Maximum tokens of a prompt; longer ones are truncated."
)
@click.option("--max-output-tokens", default=1 << 20, type=_SIZE, help="Maximum tokens of an output.")
@click.option("--vocabulary", default=1 << 20, type=_SIZE, help="Vocabulary size of the model; needed if below 4,300.")
@click.option("--max-concurrency", type=_SIZE, help="Maximum requests in flight; default: no limit.")
@click.option("--slo", default="", help="Latency targets for goodput, for example ttft=500ms,itl=30ms,e2el=10s.")
@click.option("--seed", default=0, show_default=True, type=int)
@click.option(
    "--timeout", default=600.0, show_default=True, type=NumberRange(1.0, 86400.0), help="Seconds for one request."
)
@JSON_FILE
@click.option("--detailed", is_flag=True, help="Write each answer's times to the JSON file too.")
@click.option("--svg", "svg_file", type=OUTPUT_FILE, help="Write a chart of the results, SVG.")
@with_settings(_API_KEY)
def command(
    values: Values,
    *,
    url: str,
    model: str,
    slo: str,
    timeout: float,
    max_concurrency: int | None,
    json_file: Path | None,
    detailed: bool,
    svg_file: Path | None,
    **shape: Any,
) -> None:
    """Measure a server: time to first token, inter-token latency, throughput, goodput.

    \b
      kvferry bench serve --rate 4 --requests 200 --input-tokens 256 --output-tokens 64
      kvferry bench serve --workload shared-prefix --arrivals gamma --burstiness 0.5 --rate 8 --slo ttft=500ms,itl=50ms
      kvferry bench serve --arrivals trace=mooncake.jsonl --trace-speed 0.1 --max-input-tokens 4096 --svg run.svg

    Requests are sent at their arrival times even if earlier ones are not answered, and times count from there. The JSON
    uses the names of vLLM's serving benchmark. The server must accept token ids as prompts.
    """
    from kvferry.bench.serving.http_client import Target
    from kvferry.bench.serving.run import common_errors, run
    from kvferry.bench.workload.measures import parse_slo, summary

    targets = parse_slo(slo)
    requests, num_cut = _requests(**shape)
    target = Target(str(ServerUrl.parse(url)), model, values["api_key"], timeout)
    with _progress(len(requests)) as advance:
        name, answers = asyncio.run(
            run(requests, target, SystemClock(), max_concurrency=max_concurrency, on_answer=advance)
        )
    found = summary(answers, targets)
    for error, number in common_errors(answers):
        click.echo(f"{counted(number, 'request')} failed: {error}", err=True)
    if not found["completed"]:
        raise Unavailable(f"none of {len(answers)} requests was answered; see the errors above")
    _print(found, targets, num_cut)
    settings = {"date": time.strftime("%Y%m%d-%H%M%S"), "backend": "openai", "model_id": name, **_named(shape)}
    report = {**settings, "max_concurrency": max_concurrency, "slo": slo, **found}
    if json_file is not None:
        details = _details(answers) if detailed else {}
        write_json(json_file, {**report, **details})
    if svg_file is not None:
        from kvferry.bench.serving.picture import picture

        write_file(svg_file, picture(answers, f"{name}: {_load(shape, len(answers))}", _machine(), targets))


def _load(shape: Mapping[str, Any], count: int) -> str:
    """Return the load as text: number of requests, arrivals, rate and lengths."""
    if shape["arrivals"].startswith(_TRACE):
        return f"{counted(count, 'request')} of {Path(shape['arrivals'].removeprefix(_TRACE)).name}"
    rate = "all at once" if math.isinf(shape["rate"]) else f"{shape['arrivals']} at {shape['rate']:g} requests/s"
    lengths = f"{shape['input_tokens']} input and {shape['output_tokens']} output tokens"
    return f"{counted(count, 'request')}, {shape['workload']}, {rate}, {lengths}"


def _machine() -> str:
    """Return where and when the load was sent, as text."""
    from kvferry.bench.processor import processor_name

    cores = counted(usable_cores(), "core")
    return f"sent from {processor_name()}, {cores}, {time.strftime('%Y-%m-%d %H:%M')}"


def _requests(**shape: Any) -> tuple[list[workloads.BenchRequest], int]:
    """Build the requests; also return how many were cut to the maximum lengths."""
    arrivals = shape["arrivals"]
    if arrivals.startswith(_TRACE):
        requests = _traced(Path(arrivals.removeprefix(_TRACE)), shape["count"], shape["trace_speed"])
    else:
        workload = workloads.Workload(
            shape["workload"],
            shape["input_tokens"],
            shape["output_tokens"],
            shape["spread"],
            shape["prefix_tokens"],
            shape["prefixes"],
            shape["turns"],
            shape["turn_seconds"],
        )
        process = processes.Arrivals(arrivals, shape["rate"], shape["burstiness"], shape["burst_size"])
        requests = workload.requests(shape["count"], process, shape["seed"])
    requests = workloads.in_vocabulary(requests, shape["vocabulary"])
    return workloads.clipped(requests, max_input=shape["max_input_tokens"], max_output=shape["max_output_tokens"])


def _traced(file: Path, count: int, speed: float) -> list[workloads.BenchRequest]:
    from kvferry.bench.workload.traces import read_trace

    try:
        with file.open(encoding="utf-8") as lines:
            return read_trace(lines, limit=count, speed=speed)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {str(file)!r} cannot be read: {error}", field="arrivals") from error


def _named(shape: Mapping[str, Any]) -> dict[str, object]:
    rate = shape["rate"]
    return {
        "num_prompts": shape["count"],
        "request_rate": "inf" if math.isinf(rate) else rate,
        **{key: value for key, value in shape.items() if key not in ("count", "rate")},
    }


def _details(answers: Sequence["MeasuredAnswer"]) -> dict[str, object]:
    return {
        "arrivals_s": [a.at for a in answers],
        "input_lens": [a.num_input for a in answers],
        "output_lens": [a.num_output for a in answers],
        "ttfts": [a.ttft if a.times else None for a in answers],
        "itls": [a.gaps for a in answers],
        "errors": [a.error for a in answers],
    }


def _print(found: Mapping[str, Any], targets: Mapping[str, float], num_cut: int) -> None:
    click.echo(
        f"{counted(found['completed'], 'answer')}, {found['failed']} failed, in {found['duration']:.1f} s: "
        f"{found['request_throughput']:.2f} requests/s, {found['output_throughput']:.1f} output tokens/s"
    )
    for name, title in (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2el", "end to end")):
        cells = "  ".join(f"p{p} {found[f'p{p}_{name}_ms']:9.1f}" for p in (50, 90, 95, 99))
        click.echo(f"  {title:<12} mean {found[f'mean_{name}_ms']:9.1f}  {cells} ms")
    if targets:
        click.echo(f"  goodput      {found['request_goodput']:.2f} requests/s within the targets")
    if num_cut:
        click.echo(f"  {counted(num_cut, 'request')} cut to the maximum lengths")
    if found["max_send_delay_ms"] > _LATE_MS:
        click.echo(f"  requests were sent up to {found['max_send_delay_ms']:.0f} ms late, which counts in their times")


@contextmanager
def _progress(count: int) -> Iterator[Callable[["MeasuredAnswer"], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=count, label="  requests", file=sys.stderr) as bar:
        yield lambda _: bar.update(1)
