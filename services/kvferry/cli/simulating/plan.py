"""`kvferry plan`: the sizes of a fleet by load, in the simulator."""

import sys
from pathlib import Path

import click

from kvferry.cli.options import EXIT_FAILED, NumberRange, reported
from kvferry.cli.output_files import JSON_FILE, check_distinct, write_json
from kvferry.cli.simulating.simulate import read_fleet_with_slo
from kvferry.core.errors import UsageError

_MAX_RATES = 32


@click.command("plan")
@click.argument("fleet", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--rates", default="", help="Requests per second, comma-separated; default: 0.5, 1, 2 and 4 times the file's."
)
@click.option(
    "--attain",
    default=0.95,
    show_default=True,
    type=NumberRange(0.0, 1.0, min_open=True),
    help="Share of the requests that must meet the file's slo.",
)
@click.option(
    "--simulations",
    default=200,
    show_default=True,
    type=click.IntRange(2, 10_000),
    help="Maximum number of simulations for one rate.",
)
@JSON_FILE
def command(fleet: Path, *, rates: str, attain: float, simulations: int, json_file: Path | None) -> None:
    """Find the smallest number of workers of each role for several loads: each try is a simulation of the fleet file.

    \b
      kvferry plan docs/examples/fleet-split.toml
      kvferry plan fleet.toml --rates 2,4,8,16 --attain 0.99 --json plan.json

    The file's numbers of workers are ignored; its roles, device, workload and `slo` are used. The rows show how many
    prefill and decode workers a pool needs at each rate, as `replicas` of its roles. The exit status is 1 if a rate
    needs more workers than were tried.
    """
    with reported():
        from kvferry.simulator.studies.planning import PoolPlanner, attained_share, named
        from kvferry.simulator.studies.run import simulate_pool

        check_distinct(fleet, json_file)
        spec = read_fleet_with_slo(fleet)
        shown = sys.stderr.isatty()
        planner = PoolPlanner(
            spec,
            lambda one: attained_share(simulate_pool(one, 0)),
            min_share=attain,
            max_simulations=simulations,
            on_try=lambda text: click.echo(f"  {text}", err=True) if shown else None,
        )
        base = spec.demand.arrivals.rate if spec.demand is not None else 1.0
        rows = planner.plan(_rates(rates) or [base * factor for factor in (0.5, 1.0, 2.0, 4.0)])
        has_prices = any(row.price_per_hour for row in rows)
        cost = f" {'cost/hour':>9}" if has_prices else ""
        click.echo(f"{'requests/s':>10}  {'workers':<28} {'within slo':>10}{cost}")
        for row in rows:
            note = "" if row.is_enough else "  not enough"
            cost = f" {row.price_per_hour:>9.2f}" if has_prices else ""
            click.echo(f"{row.rate:>10g}  {named(row.sizes):<28} {row.attained:>10.1%}{cost}{note}")
        if has_prices:
            click.echo("cost/hour: all workers, in the currency of the file's price_per_hour")
        result = {
            "attain": attain,
            "simulations": planner.num_simulations,
            "rows": [
                {
                    "rate": row.rate,
                    "replicas": dict(row.sizes),
                    "attained": round(row.attained, 4),
                    "is_enough": row.is_enough,
                    "price_per_hour": round(row.price_per_hour, 4),
                }
                for row in rows
            ],
        }
        write_json(json_file, result)
    if not all(row.is_enough for row in rows):
        sys.exit(EXIT_FAILED)


def _rates(text: str) -> list[float]:
    """Parse the option `--rates`.

    Raises:
        UsageError: a part is not a number in the range of `workload.rate`, or there are too many.
    """
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0.0]
    if len(found) > _MAX_RATES or not all(1e-6 <= rate <= 1e9 for rate in found):
        raise UsageError(
            f"--rates {text[:80]!r} must be at most {_MAX_RATES} numbers from 1e-6 to 1e9, for example 2,4,8",
            field="rates",
        )
    return found
