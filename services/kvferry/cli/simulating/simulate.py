"""`kvferry simulate`: a fleet under a workload, in virtual time."""

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvferry.cli.amounts import counted
from kvferry.cli.options import reported
from kvferry.cli.output_files import JSON_FILE, OUTPUT_FILE, check_distinct, error_text, write_file, write_json
from kvferry.core.errors import Unavailable, UsageError
from kvferry.core.process.config import check_regular
from kvferry.core.process.cores import usable_cores
from kvferry.core.process.parent import die_with_parent

if TYPE_CHECKING:
    from kvferry.simulator.files.spec import FleetSpec
    from kvferry.simulator.fleet.fleet import PoolResult
    from kvferry.simulator.fleet.measures import Measures

T = TypeVar("T")
R = TypeVar("R")
_MAX_SHOWN_PATH = 1000
_MAX_BYTES = 1 << 30
"""Maximum size in bytes of a file that a fleet file names."""


@click.command("simulate")
@click.argument("fleet", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--compare",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Simulate this fleet too, and show the differences.",
)
@JSON_FILE
@click.option("--svg", "svg_file", type=OUTPUT_FILE, help="Write a chart of the latency distributions, SVG.")
@click.option("--seed", type=click.IntRange(0, 1 << 53), help="Seed of the workload; default: the file's seed.")
@click.option(
    "--processes", type=click.IntRange(1, 256), help="Processes among which pools are divided; default: one per core."
)
def command(
    fleet: Path,
    *,
    compare: Path | None,
    json_file: Path | None,
    svg_file: Path | None,
    seed: int | None,
    processes: int | None,
) -> None:
    """Simulate the fleet of a TOML file: the production code of gateway and engines decides, in virtual time.

    \b
      kvferry simulate docs/examples/fleet.toml
      kvferry simulate docs/examples/fleet.toml --compare docs/examples/fleet-split.toml
      kvferry simulate fleet.toml --json result.json --svg latencies.svg

    \b
    The smallest file: one worker on a device whose step takes 8 ms and 20 us for each token.
      [[role]]
      role = "both"
      [device]
      step_ms = 8.0
      token_us = 20.0
      [workload]
      requests = 1000
      rate = 4.0

    All other fields, and how a device profile is measured, are in docs/simulator.md. The same file and seed give the
    same result, on any machine and with any number of processes. `--json` writes ttft_ms, itl_ms and e2e_ms (p50, p90,
    p99), goodput (requests per second within the file's `slo`), hit_rate, requests and seconds_simulated; with
    `--compare`, also the other fleet's results, under `compared`.
    """
    with reported():
        from kvferry.simulator.files.picture import picture
        from kvferry.simulator.files.report import as_json, comparison, lines

        check_distinct(fleet, json_file, svg_file)
        check_distinct(compare, json_file, svg_file)
        base_spec, base = _simulate(fleet, seed, processes)
        found = as_json(base_spec, base)
        click.echo("\n".join(lines(found)))
        drawn = [(fleet.stem, base.measures)]
        if compare is not None:
            other_spec, other = _simulate(compare, seed, processes)
            compared = as_json(other_spec, other)
            click.echo(f"\n{compare}:")
            click.echo("\n".join([*lines(compared), "", *comparison(found, compared)]))
            found["compared"] = compared
            drawn.append((compare.stem, other.measures))
        write_json(json_file, found)
        if svg_file is not None:
            write_file(svg_file, picture(f"Simulated latencies, seed {base_spec.seed}", drawn, _demand(base_spec)))


def _demand(spec: "FleetSpec") -> str:
    """Return the workload of a fleet as text."""
    if spec.demand is None:
        return f"{counted(spec.num_requests, 'request')} of a trace"
    arrivals = spec.demand.arrivals
    rate = "all at once" if math.isinf(arrivals.rate) else f"{arrivals.process} at {arrivals.rate:g} requests/s"
    return f"{counted(spec.num_requests, 'request')} for each of {counted(spec.pools, 'pool')}, {rate}"


def _simulate(path: Path, seed: int | None, processes: int | None) -> "tuple[FleetSpec, PoolResult]":
    from kvferry.simulator.studies.run import simulate_pool

    spec = read_fleet_file(path, seed)
    count = min(spec.pools, processes or usable_cores())
    if count == 1:
        with _progress(spec.num_requests * spec.pools, path.stem) as advance:
            return spec, _merged([simulate_pool(spec, index, advance) for index in range(spec.pools)])
    with (
        _progress(spec.num_requests * spec.pools, path.stem) as advance,
        _in_processes(_one_pool, [(str(path), seed, index) for index in range(spec.pools)], count) as found,
    ):
        results = []
        for result in found:
            advance(result.measures, 0.0)
            results.append(result)
        return spec, _merged(results)


@contextmanager
def _in_processes(function: "Callable[[T], R]", requests: "list[T]", count: int) -> "Iterator[Iterator[R]]":
    """Call a function in processes that end with this one, and at once if the block raises.

    Args:
        function: called with each of `requests`.
        requests: its arguments.
        count: number of processes.

    Raises:
        Unavailable: a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(count, context, initializer=die_with_parent, initargs=(os.getpid(),))
    try:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only this process handles Ctrl-C
        try:
            results = executor.map(function, requests)
        finally:
            signal.signal(signal.SIGINT, handler)
        yield results
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise Unavailable(
                "a process of the simulation was killed, perhaps for its memory; set --processes 1, or simulate fewer "
                "workers or blocks"
            ) from None
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _one_pool(request: tuple[str, int | None, int]) -> "PoolResult":
    """Simulate one pool in a separate process."""
    from kvferry.simulator.studies.run import simulate_pool

    path, seed, index = request
    return simulate_pool(read_fleet_file(Path(path), seed), index)


def _merged(results: "list[PoolResult]") -> "PoolResult":
    whole, *others = results
    for other in others:
        whole.merge(other)
    return whole


def read_fleet_file(path: Path, seed: int | None = None) -> "FleetSpec":
    """Read a fleet file, and the files that it names.

    Args:
        path: the fleet file.
        seed: replaces the file's seed; `None` keeps it.

    Raises:
        UsageError: a file cannot be read, or a field is invalid.
    """
    from dataclasses import replace

    from kvferry.simulator.files.spec import read_fleet

    spec = read_fleet(_text(path, "FLEET"), lambda name: _read_referenced_file(path.parent, name))
    return spec if seed is None else replace(spec, seed=seed)


def read_fleet_with_slo(path: Path) -> "FleetSpec":
    """Read a fleet file that must have latency targets.

    Raises:
        UsageError: see `read_fleet_file`, or the targets are missing.
    """
    spec = read_fleet_file(path)
    if not spec.pool.gateway.slo:
        raise UsageError('slo is missing; add for example slo = "ttft=1s,tpot=50ms" to the fleet file', field="slo")
    return spec


def _read_referenced_file(folder: Path, name: str) -> str:
    """Return the text of a file that a fleet file refers to.

    Args:
        folder: folder of the fleet file.
        name: path from the folder, or name of a shipped device profile.
    """
    profiles = resources.files("kvferry.simulator") / "profiles"
    shipped = {one.name: one for one in profiles.iterdir()}.get(f"{name}.toml")
    if shipped is not None:
        return shipped.read_text("utf-8")
    return _text(folder / name, name)


def _text(path: Path, field: str) -> str:
    try:
        check_regular(path, field, most_bytes=_MAX_BYTES, expected="a text file")
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:  # a NUL in the path, or text that is not UTF-8
        shown = repr(str(path)[:_MAX_SHOWN_PATH])
        raise UsageError(
            f"cannot read {shown}: {error_text(error)}; use the path of a text file", field=field
        ) from None


@contextmanager
def _progress(count: int, label: str) -> "Iterator[Callable[[Measures, float], None]]":
    if not sys.stderr.isatty():
        yield lambda _measures, _now: None
        return
    with click.progressbar(length=count, label=f"  {label}", file=sys.stderr) as bar:
        shown: dict[int, int] = {}

        def advance(measures: Any, _now: float) -> None:
            before = shown.get(id(measures), 0)
            shown[id(measures)] = measures.completed
            bar.update(measures.completed - before)

        yield advance
