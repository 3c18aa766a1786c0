"""`kvferry profile`: records the steps of an engine and replays them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.engine_settings import engine_settings
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import NumberRange, Values, pool_tls_files, read_key, with_settings
from kvferry.cli.output_files import JSON_FILE, OUTPUT_FILE, check_distinct, write_file, write_json
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.process.config import check_regular
from kvferry.core.process.cores import usable_cores
from kvferry.core.settings import processes as settings

if TYPE_CHECKING:
    from kvferry.engine.observe.step_log import StepLog
    from kvferry.engine.observe.timeline import TimelinePhase
    from kvferry.engine.offline.llm import LLM

_STEPS = click.option(
    "--steps", default=200, show_default=True, type=click.IntRange(1, 10_000), help="Number of steps to record."
)
_TOKENS = click.option(
    "--tokens", is_flag=True, help="Put the tokens of prompts and outputs into the log, for a replay by an engine."
)
_MAX_LOG_BYTES = 1 << 30
_ENGINE = (settings.MODEL, settings.LOAD_FORMAT, settings.CUDA_GRAPHS, *settings.ENGINE)


def _outputs(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the files that a recording is written to."""
    for option in (
        JSON_FILE,
        click.option("--log", "log_file", type=OUTPUT_FILE, help="Write the step log as JSON lines."),
        click.option("--trace", "trace_file", type=OUTPUT_FILE, help="Write the phases as a Chrome trace."),
    ):
        function = option(function)
    return function


@click.group("profile")
def command() -> None:
    """Record the steps of an engine: phases and gaps as a trace file, and a log that can be replayed.

    \b
      kvferry profile model --batch 8 --trace steps.json           open steps.json in Perfetto or chrome://tracing
      kvferry profile worker 127.0.0.1:9101 --ticket-key-file ticket.key --log steps.jsonl
      kvferry profile replay steps.jsonl                           the simulator plans the same steps
      kvferry profile replay steps.jsonl --against engine          an engine too, with the same tokens
    """


@command.command("model", cls=SettingsCommand)
@_STEPS
@click.option("--batch", default=4, show_default=True, type=click.IntRange(1, 512), help="Number of requests.")
@click.option(
    "--input-tokens", default=128, show_default=True, type=click.IntRange(1, 1 << 20), help="Tokens per prompt."
)
@click.option(
    "--output-tokens", default=64, show_default=True, type=click.IntRange(1, 1 << 16), help="Tokens per output."
)
@_TOKENS
@_outputs
@with_settings(_ENGINE)
def of_model(
    values: Values, *, steps: int, batch: int, input_tokens: int, output_tokens: int, tokens: bool, **files: Any
) -> None:
    """Record an engine in this process; one request arrives before each step until all have arrived."""
    from kvferry.bench.profiling import profile_engine

    check_distinct(*files.values())
    llm = _llm(values)
    recording = profile_engine(
        llm, SystemClock(), steps=steps, shapes=[(input_tokens, output_tokens)] * batch, has_tokens=tokens
    )
    _write(recording.timeline.spans, recording.log, **files)


@command.command("worker", cls=SettingsCommand)
@click.argument("address")
@_STEPS
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=NumberRange(0, 600, min_open=True),
    help="Seconds to wait for the steps.",
)
@click.option(
    "--reset-cache", is_flag=True, help="Empty the prefix cache first: the log of an idle worker can then be replayed."
)
@_TOKENS
@_outputs
@with_settings((*settings.TICKET_KEY, *settings.POOL_TLS))
def of_worker(
    values: Values, *, address: str, steps: int, timeout: float, reset_cache: bool, tokens: bool, **files: Any
) -> None:
    """Record a running worker; ADDRESS is HOST:PORT of its --admin."""
    from kvferry.bench.profiling import spans_of
    from kvferry.cli.profile_call import profile_worker
    from kvferry.engine.observe.log_file import read_log

    check_distinct(*files.values())
    keys = read_key(values, "ticket_key")
    if not keys:
        raise UsageError("the call needs the pool's ticket key; set --ticket-key-file", field="ticket_key_file")
    found = profile_worker(
        address,
        keys[0],
        pool_tls_files(values),
        steps=steps,
        timeout_seconds=timeout,
        resets_cache=reset_cache,
        has_tokens=tokens,
    )
    trace = json.loads(found.trace)
    log_text = found.log.decode()
    _write(spans_of(trace), read_log(log_text.splitlines()), trace=trace, log_text=log_text, **files)


@command.command("replay", cls=SettingsCommand)
@click.argument("log", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--against",
    default="simulator",
    show_default=True,
    type=click.Choice(("simulator", "engine")),
    help="Component that processes the log's events.",
)
@JSON_FILE
@with_settings(_ENGINE)
def replay(values: Values, *, log: Path, against: str, json_file: Path | None) -> None:
    """Replay a step log, and compare step by step; the exit status is 1 if a step differs."""
    from kvferry.engine.observe.log_file import read_log

    check_distinct(log, json_file)
    check_regular(log, "log", most_bytes=_MAX_LOG_BYTES, expected=f"a log of at most {_MAX_LOG_BYTES >> 20} MiB")
    with log.open(encoding="utf-8") as lines:
        found = read_log(lines)
    result = _against_engine(values, found) if against == "engine" else _against_simulator(found)
    write_json(json_file, result)
    if not result["equal"]:
        raise SystemExit(1)


def _against_simulator(log: "StepLog") -> dict[str, object]:
    from kvferry.simulator.worker.fitting import fit
    from kvferry.simulator.worker.step_replay import StepReplay

    done = StepReplay(log).run()
    if done.difference is not None:
        at = done.difference
        click.echo(f"step {at.step} differs: logged {at.logged}, planned {at.planned}")
        return {"equal": False, "steps": done.num_steps, "differs_at": at.step}
    click.echo(f"{done.num_steps} steps have the same schedule")
    result: dict[str, object] = {"equal": True, "steps": done.num_steps}
    if len(done.work) >= 8:
        fitted = fit(done.work)
        click.echo(
            f"a device profile fits these steps with a median error of {100 * fitted.median_error:.1f} %: "
            f"step_ms = {1e3 * fitted.profile.step:.4g}, token_us = {1e6 * fitted.profile.token:.4g}, "
            f"kv_token_ns = {1e9 * fitted.profile.kv_token:.4g}, pair_ns = {1e9 * fitted.profile.pair:.4g}"
        )
        result["median_error"] = round(fitted.median_error, 4)
    return result


def _against_engine(values: Values, log: "StepLog") -> dict[str, object]:
    from kvferry.bench.step_replay import engine_for
    from kvferry.bench.step_replay import replay as replay_with

    settings_of = engine_settings(values, threads=values["threads"] or usable_cores())
    done = replay_with(log, engine_for(log, settings_of))
    if done.is_equal:
        click.echo(f"{done.num_steps} steps have the same schedule, and {done.num_tokens} tokens are the same")
    elif done.schedule_differs_at is not None:
        click.echo(f"step {done.schedule_differs_at} has a different schedule")
    else:
        click.echo(f"step {done.tokens_differ_at} has different tokens")
    return {"equal": done.is_equal, "steps": done.num_steps, "tokens": done.num_tokens}


def _llm(values: Values) -> "LLM":
    from kvferry.engine.offline.llm import LLM

    return LLM.of(engine_settings(values, threads=values["threads"] or usable_cores()))


def _write(
    spans: "list[TimelinePhase]",
    log: "StepLog",
    *,
    trace_file: Path | None,
    log_file: Path | None,
    json_file: Path | None,
    trace: object = None,
    log_text: str = "",
) -> None:
    from kvferry.engine.observe.log_file import write_log
    from kvferry.engine.observe.timeline import chrome_trace, statistics, with_gaps

    known = with_gaps(spans)
    rows = statistics(known)
    steps = [step for step in log.steps if step.plan]
    if not steps:
        raise UsageError(
            "no steps were recorded, since the worker was idle the whole time; send it requests", field="timeout"
        )
    click.echo(
        f"{len(steps)} steps in {steps[-1].ended - steps[0].begun:.3f} s; share of the time, mean, p50, p99 in ms"
    )
    for row in rows:
        click.echo(
            f"  {row.lane:8} {row.name:14} {100 * row.share:5.1f} %  {row.mean_ms:9.3f} {row.p50_ms:9.3f} "
            f"{row.p99_ms:9.3f}"
        )
    click.echo(f"the log cannot be replayed: {log.obstacle}" if log.obstacle else "the log can be replayed")
    if trace_file is not None:
        write_file(trace_file, json.dumps(trace or chrome_trace(known, log.steps)))
    if log_file is not None:
        write_file(log_file, log_text or "".join(write_log(log)))
    write_json(
        json_file,
        {
            "steps": len(steps),
            "seconds": round(steps[-1].ended - steps[0].begun, 6),
            "replayable": not log.obstacle,
            "phases": [
                {
                    "lane": row.lane, "name": row.name, "count": row.count, "mean_ms": round(row.mean_ms, 6),
                    "p50_ms": round(row.p50_ms, 6), "p99_ms": round(row.p99_ms, 6), "share": round(row.share, 6),
                }
                for row in rows
            ],
        },
    )  # fmt: skip
