"""`kvferry bench`: measurements that can be repeated, each against a bound that is measured in the same run."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.options import print_json, reported
from kvferry.core.clock import SystemClock
from kvferry.core.errors import KvferryError, UsageError
from kvferry.core.settings import size_bytes

if TYPE_CHECKING:
    from kvferry.bench.transfer import Run


@click.group("bench")
def command() -> None:
    """Measure, and say how near to the bound it is.

    \b
      kvferry bench transfer                       every transport, 1 to 64 blocks of the default model
      kvferry bench transfer --transport shm --transport tcp --json rows.json
    """


@command.command("transfer")
@click.option("--transport", "names", multiple=True, metavar="NAME", help="Only these; default: all that run here.")
@click.option("--blocks", "counts", multiple=True, type=click.IntRange(1, 1 << 16), help="Blocks a read; repeat.")
@click.option("--block-size", default="360KiB", show_default=True, help="Bytes of a block.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1, 10_000), help="Rounds of each size.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write summary and rows.")
def transfer(names: tuple[str, ...], counts: tuple[int, ...], block_size: str, rounds: int, json_file: Path) -> None:
    """Pages from one process to another, by transport, size and scatter: against memcpy, loopback, bare NIXL."""
    from kvferry.bench import transfer as bench
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
        found = {"summary": bench.summary(runs), "runs": bench.as_rows(runs)}
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1) + "\n")
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
