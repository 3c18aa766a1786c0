"""`python -m harness.fuzz`: runs all targets, each in a process of its own, several at a time."""

import subprocess
import sys
from random import SystemRandom

import click

from harness.fuzz.driver import TARGETS, can_guide, drive, drive_guided
from kvferry.core.clock import SystemClock

_EXTRA_SECONDS = 180.0


@click.command()
@click.option("--seconds", default=3600.0, show_default=True, help="Time per target.")
@click.option("--target", "names", multiple=True, type=click.Choice(list(TARGETS)), help="Default: all.")
@click.option("--side-by-side", default=2, show_default=True, help="Number of targets that run concurrently.")
@click.option("--seed", type=int, help="Seed of the mutations; random by default.")
@click.option("--here", is_flag=True, help="Run one target in this process.")
@click.option("--guided/--unguided", default=True, show_default=True, help="Use atheris where it is installed.")
def main(seconds: float, names: tuple[str, ...], side_by_side: int, seed: int | None, here: bool, guided: bool) -> None:
    """Run fuzz targets; the exit status is 1 if there was a finding."""
    seed = SystemRandom().randrange(1, 1 << 31) if seed is None else seed
    if here:
        (name,) = names
        if guided and can_guide(TARGETS[name]):
            drive_guided(TARGETS[name], seconds, seed)
        click.echo(f"{name}: {drive(TARGETS[name], seconds, seed)} runs, seed {seed}")
        return
    waiting, running, failed = list(names or TARGETS), dict[str, tuple[subprocess.Popen[str], float]](), list[str]()
    clock = SystemClock()
    while waiting or running:
        while waiting and len(running) < side_by_side:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "harness.fuzz", "--here", "--target", name, "--seconds", str(seconds)]
            command += ["--seed", str(seed), "--guided" if guided else "--unguided"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running[name] = process, clock.monotonic() + seconds + _EXTRA_SECONDS
        name, (process, deadline) = next(iter(running.items()))
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - clock.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate(timeout=30)
            output += f"\n{name} did not end in time"
        del running[name]
        if process.returncode:
            failed.append(name)
        lines = output.splitlines()
        click.echo(
            f"{name}: status {process.returncode}, seed {seed}\n  "
            + "\n  ".join(lines[-25 if process.returncode else -1 :])
        )
    if failed:
        raise SystemExit(f"findings or failures: {', '.join(failed)}")


if __name__ == "__main__":
    main()
