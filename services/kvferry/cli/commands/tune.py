"""`kvferry tune`: searches the settings of a fleet in the simulator."""

import sys
from pathlib import Path

import click

from kvferry.cli.commands.simulate import JSON_FILE, read_fleet_with_slo, write_json
from kvferry.cli.options import reported


@click.command("tune")
@click.argument("fleet", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--simulations",
    default=80,
    show_default=True,
    type=click.IntRange(2, 10_000),
    help="Maximum number of simulations.",
)
@click.option(
    "--write", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write the changed fields as TOML."
)
@JSON_FILE
def command(fleet: Path, *, simulations: int, out: Path | None, json_file: Path | None) -> None:
    """Search for settings of a fleet with higher goodput: each try is a simulation of the fleet's file.

    \b
      kvferry tune docs/examples/fleet-split.toml
      kvferry tune fleet.toml --simulations 200 --write better.toml

    Tries routing policy, split of prefill and decode workers, budgets, chunks, sequences and scheduling, one field at a
    time, and prints the gain of each change. The file needs an `slo`. The result holds for its workload and device
    profile; measure it with `kvferry bench serve` before you use it. docs/simulator.md has more.
    """
    with reported():
        from kvferry.simulator.run import simulate_pool
        from kvferry.simulator.tuning import Score, fields_of, tune

        spec = read_fleet_with_slo(fleet)
        shown = sys.stderr.isatty()
        found = tune(
            spec,
            lambda one: Score.of(simulate_pool(one, 0)),
            most=simulations,
            on_try=lambda text: click.echo(f"  {text}", err=True) if shown else None,
        )
        for change in found.changes:
            click.echo(f"{change.name}: {change.before} -> {change.after}, {100 * change.gain:+.1f} %")
        click.echo(
            f"goodput {found.base.goodput:.3f} -> {found.score.goodput:.3f} requests/s, "
            f"in {found.simulations} simulations"
        )
        text = fields_of(found)
        if out is not None:
            out.write_text(text, "utf-8")
        elif text:
            click.echo(f"\n{text}")
        result = {
            "goodput": found.score.goodput,
            "base_goodput": found.base.goodput,
            "simulations": found.simulations,
            "changes": [
                {"field": c.name, "before": c.before, "after": c.after, "gain": round(c.gain, 4)} for c in found.changes
            ],
        }
        write_json(json_file, result)
