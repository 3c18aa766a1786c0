"""`kvferry tune`: searches for better settings of a fleet in the simulator, and runs the best few."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.amounts import counted, duration_of
from kvferry.cli.options import reported
from kvferry.cli.output_files import JSON_FILE, OUTPUT_FILE, check_distinct, write_file, write_json
from kvferry.cli.simulating.simulate import read_fleet_with_slo

if TYPE_CHECKING:
    from kvferry.simulator.files.spec import FleetSpec
    from kvferry.simulator.studies.tuning import StudyScore, Tuned


@click.command("tune")
@click.argument("fleet", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--simulations",
    default=80,
    show_default=True,
    type=click.IntRange(2, 10_000),
    help="Maximum number of simulations.",
)
@click.option("--write", "out", type=OUTPUT_FILE, help="Write the changed fields as TOML.")
@click.option("--live", is_flag=True, help="Then run the best fleets on this machine, and choose by their goodput.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="With --live: model of the workers.")
@click.option(
    "--best",
    default=2,
    show_default=True,
    type=click.IntRange(1, 16),
    help="With --live: number of fleets besides the file's.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    type=click.IntRange(1, 50),
    help="With --live: number of runs of each fleet.",
)
@click.option(
    "--requests", default=60, show_default=True, type=click.IntRange(1, 10_000), help="With --live: requests per run."
)
@click.option(
    "--threads",
    default=0,
    show_default=True,
    type=click.IntRange(0, 512),
    help="With --live: threads per worker; 0: the cores are divided among the workers.",
)
@JSON_FILE
def command(
    fleet: Path,
    *,
    simulations: int,
    out: Path | None,
    live: bool,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Search for settings of a fleet with higher goodput: each try is a simulation of the fleet file.

    \b
      kvferry tune docs/examples/fleet-split.toml
      kvferry tune fleet.toml --simulations 200 --write better.toml
      kvferry tune fleet.toml --live --best 3 --requests 100

    Tries routing policy, split of prefill and decode workers, budgets, chunks, sequences and scheduling, one field at a
    time, and prints the gain of each change. The file needs an `slo`. The result holds for the file's workload and
    device profile. With --live, the file's fleet and the best few of the search are started on this machine, in turn,
    and serve the first requests of the workload; the fleet with the highest median goodput is chosen. docs/simulator.md
    has more.
    """
    with reported():
        from kvferry.simulator.studies.run import simulate_pool
        from kvferry.simulator.studies.tuning import StudyScore as Score
        from kvferry.simulator.studies.tuning import fields_of, tune

        check_distinct(fleet, json_file, out)
        spec = read_fleet_with_slo(fleet)
        shown = sys.stderr.isatty()
        found = tune(
            spec,
            lambda one: Score.of(simulate_pool(one, 0)),
            max_simulations=simulations,
            on_try=lambda text: click.echo(f"  {text}", err=True) if shown else None,
        )
        for change in found.changes:
            click.echo(
                f"{change.name}: {change.before} -> {change.after}, {change.quantity} {100 * change.gain:+.1f} %"
            )
        click.echo(
            f"goodput {found.base.goodput:.3f} -> {found.score.goodput:.3f} requests/s, mean time of a request "
            f"{_mean_time(found.base)} -> {_mean_time(found.score)}, in {counted(found.simulations, 'simulation')}"
        )
        result: dict[str, Any] = {
            "goodput": found.score.goodput,
            "base_goodput": found.base.goodput,
            "simulations": found.simulations,
            "changes": [
                {
                    "field": c.name,
                    "before": c.before,
                    "after": c.after,
                    "gain": round(c.gain, 4),
                    "quantity": c.quantity,
                }
                for c in found.changes
            ],
        }
        chosen = found.spec
        if live:
            chosen, result["live"] = _run_live(found, **options)
        text = fields_of(spec, chosen)
        if text and out is None:
            click.echo(f"\n{text}")
        write_json(json_file, result)
        if out is not None:
            write_file(out, text)


def _mean_time(score: "StudyScore") -> str:
    return duration_of(1e3 / score.speed) if score.speed else "unknown"


def _run_live(
    found: "Tuned", *, model: str, best: int, rounds: int, requests: int, threads: int
) -> "tuple[FleetSpec, list[dict[str, object]]]":
    """Run the best fleets; return the chosen one, and the results of each."""
    from kvferry.cli.simulating.live_fleets import choose, compare, goodput, live_requests, serve, stack_of
    from kvferry.core.clock import SystemClock
    from kvferry.simulator.studies.tuning import MIN_GAIN, differences

    fleets = found.best(best)
    base, slo, clock = fleets[0][0], fleets[0][0].pool.gateway.slo, SystemClock()
    request = live_requests(base, requests)

    def serve_one(spec: "FleetSpec") -> float:
        return goodput(asyncio.run(serve(stack_of(spec, model, threads), request, clock)), slo)

    names = [
        ", ".join(f"{name} = {value}" for name, value in differences(base, spec).items()) or "as in the file"
        for spec, _ in fleets
    ]
    scores = compare(
        [spec for spec, _ in fleets],
        serve_one,
        rounds,
        lambda index, value: click.echo(f"  live: {value:.3f} requests/s, {names[index]}", err=True),
    )
    place = choose(scores, MIN_GAIN)
    rows: list[dict[str, object]] = []
    for index, ((_, simulated), live, name) in enumerate(zip(fleets, scores, names, strict=True)):
        mark = "*" if index == place else " "
        click.echo(
            f"{mark} simulated {simulated.goodput:.3f}, live {live.goodput:.3f} "
            f"({min(live.goodputs):.3f} to {max(live.goodputs):.3f}) requests/s: {name}"
        )
        rows.append({
            "fleet": name, "simulated": simulated.goodput, "goodput": live.goodput, "rounds": list(live.goodputs),
            "chosen": index == place,
        })  # fmt: skip
    return fleets[place][0], rows
