"""Run `kvferry up` under siege and report: `python -m harness.siege [--seconds 600] [--attack NAME]...`.

Exit status 1 if a limit of `LIMITS` is exceeded, a worker exited, or something is not released at the end.
"""

import asyncio
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import psutil

from harness.servers.processes import running
from harness.siege.attacks import ATTACKS, Target
from harness.siege.canary import Canary, p95
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock

CLOCK = SystemClock()
OPEN_FILES = 1024
CALM_STREAMS = 30
PAUSE_SECONDS = 0.3
SETTLE_SECONDS = 15.0
LIMITS = {
    "first token ratio": 2.0,
    "between tokens ratio": 2.0,
    "gateway MiB": 600.0,
    "gateway growth MiB": 48.0,
    "log MiB": 10.0,
    "worker exits": 0.0,
    "canary failures": 0.0,
}
"""Limits. A ratio of latencies is that of the 95th percentile under siege to the median before. The growth of memory is
that of the gateway from before to some seconds after the siege: large messages leave objects scattered over Python's
arenas, 10 to 40 MiB that further sieges neither free nor increase."""


@contextmanager
def attackers(target: Target, names: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the attacks in a process of their own, so that they do not delay the canary's measurement."""
    command = [sys.executable, "-m", "harness.siege.attacks", target.http, target.grpc, *names]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def besiege(
    target: Target, names: Sequence[str], seconds: float, gateway: psutil.Process
) -> tuple[Canary, Canary, float]:
    """Measure the canary before and during the attacks; return both results, and the gateway's largest memory
    in bytes.
    """
    calm, disturbed, most = Canary(), Canary(), 0.0
    async with AsyncClient(target.grpc) as client:
        for _ in range(CALM_STREAMS):
            await calm.stream(client)
            await asyncio.sleep(PAUSE_SECONDS)
        with attackers(target, names) as process:
            deadline = CLOCK.monotonic() + seconds
            while CLOCK.monotonic() < deadline:
                await disturbed.stream(client)
                most = max(most, gateway.memory_info().rss)
                if process.poll() is not None:
                    raise SystemExit(f"the attackers' process exited with status {process.returncode}")
                await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)
    return calm, disturbed, most


@click.command()
@click.option("--seconds", default=600.0, show_default=True)
@click.option(
    "--attack",
    "names",
    multiple=True,
    type=click.Choice(list(ATTACKS)),
    help="Attack to run; can be repeated. Default: all.",
)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
def main(seconds: float, names: tuple[str, ...], model: str) -> None:
    """Attack `kvferry up`, and compare the latency of a canary with its latency before the attack."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ("--model", model, "--threads", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
        prefix = ("sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@" 2>{log}', "sh")
        with running("up", *flags, prefix=prefix) as stack:
            ready = stack.wait_for("ready")
            target = Target(str(ready["http"]), str(ready["grpc"]))
            family = psutil.Process(stack.process.pid)
            children = family.children()
            gateway = next(child for child in children if "gateway" in child.cmdline())
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            before = gateway.memory_info().rss
            calm, disturbed, most = asyncio.run(besiege(target, names or tuple(ATTACKS), seconds, gateway))
            survivors = {child.pid for child in family.children()}
            exits = sum(child.pid not in survivors for child in children)
            latencies = (
                ("first token", disturbed.first, calm.first),
                ("second token", disturbed.second, calm.second),
                ("between tokens", disturbed.gaps, calm.gaps),
            )
            figures = {
                "first token ratio": p95(disturbed.first) / statistics.median(calm.first),
                "between tokens ratio": p95(disturbed.between) / statistics.median(calm.between),
                "gateway MiB": most / (1 << 20),
                "gateway growth MiB": (gateway.memory_info().rss - before) / (1 << 20),
                "log MiB": log.stat().st_size / (1 << 20),
                "worker exits": float(exits),
                "canary failures": float(len(disturbed.failures)),
            }
            click.echo(f"streams             {len(disturbed.first)}, {len(calm.first)} before")
            for name, values, base in latencies:
                click.echo(
                    f"{name:19s} p50 {statistics.median(values) * 1e3:.2f} ms, p95 {p95(values) * 1e3:.2f} ms, "
                    f"max {max(values) * 1e3:.1f} ms; before p50 {statistics.median(base) * 1e3:.2f} ms, "
                    f"p95 {p95(base) * 1e3:.2f} ms"
                )
            click.echo(f"gateway memory      {before >> 20} MiB before, {gateway.memory_info().rss >> 20} MiB after")
            broken = False
            for name, limit in LIMITS.items():
                ok = figures[name] <= limit
                broken |= not ok
                click.echo(f"{name:19s} {figures[name]:.2f} (limit {limit:g}){'' if ok else '  EXCEEDED'}")
            for failure in disturbed.failures[:5]:
                click.echo(f"failure: {failure}")
            if broken:
                click.echo(log.read_text("utf-8", "replace")[-2000:])
            sys.exit(broken)


if __name__ == "__main__":
    main()
