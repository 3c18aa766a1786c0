"""`python -m harness.explorer`: explores scenarios, runs mutations, replays traces; exit status 1 on a violation."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.explorer.mutations import MUTATIONS
from harness.explorer.parts import PRODUCTION, Parts
from harness.explorer.scenario import SCENARIOS, Scenario, scenario
from harness.explorer.search import Found, explore, replay, walk
from harness.explorer.shrink import shrink
from harness.explorer.world import label
from kvferry.core.clock import SystemClock

_LARGE_WALKS = 5000


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
    parts = PRODUCTION
    chosen = [scenario(name) for name in options.scenario] or list(SCENARIOS)
    if options.mutation:
        broken = next((m for m in MUTATIONS if m.name == options.mutation), None)
        if broken is None:
            sys.stderr.write(f"unknown mutation {options.mutation!r}; docs/explorer.md lists all mutations\n")
            return 2
        parts = broken.parts
        chosen = [scenario(broken.scenario)] if not options.scenario else chosen
    if options.faults is not None:
        chosen = [replace(s, faults=options.faults) for s in chosen]
    results = [_look(each, parts, options) for each in chosen]
    return 0 if all(results) else 1


def _look(chosen: Scenario, parts: Parts, options: argparse.Namespace) -> bool:
    clock = SystemClock()
    begun = clock.monotonic()
    shows = sys.stderr.isatty()
    walks = options.walks or (_LARGE_WALKS if chosen.is_large else 0)

    def progress(depth: int, states: int, front: int) -> None:
        if shows:
            rate = states / max(clock.monotonic() - begun, 1e-9)
            sys.stderr.write(
                f"\r{chosen.name}: depth {depth}, {states:,} states, {front:,} in the queue, {rate:,.0f}/s  "
            )
            sys.stderr.flush()

    if options.replay:
        labels = [line.strip() for line in Path(options.replay).read_text("utf-8").splitlines() if line.strip()]
        found, what = replay(chosen, parts, labels), "replayed"
    elif walks:
        found = walk(chosen, parts, seed=options.seed, walks=walks)
        what = f"seeds from {options.seed}"
        if found.violation is not None:
            what = f"seed {found.seed}, {len(found.trace)} steps before shrinking"
            found = shrink(chosen, parts, found)
    else:
        found = explore(chosen, parts, max_states=options.max_states, progress=progress)
        what = "complete" if found.is_complete else "cut short"
    seconds = clock.monotonic() - begun
    if shows:
        sys.stderr.write("\r\x1b[K")
    unit = "walks " if walks else "states"
    sys.stdout.write(
        f"{chosen.name:11} {found.states:>9,} {unit} {found.steps:>10,} steps, depth {found.depth:>3}, "
        f"{seconds:6.1f} s, {what}\n"
    )
    if found.violation is None:
        return True
    sys.stdout.write(_told(found))
    return False


def _told(found: Found) -> str:
    lines = [f"  {found.violation}", "  after", *(f"    {label(action)}" for action in found.trace)]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make explore ARGS=", description="Explore the states of the hand-off.")
    parser.add_argument("--scenario", action="append", default=[], help="name of a scenario; may be repeated")
    parser.add_argument("--faults", type=int, help="maximum faults per run; default: the scenario's number")
    parser.add_argument(
        "--max-states", type=int, default=2_000_000, help="abandon a scenario after this number of states"
    )
    parser.add_argument("--walks", type=int, default=0, help="number of random walks, instead of an exhaustive search")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first walk; later walks use consecutive seeds")
    parser.add_argument("--mutation", help="name of a mutation to apply")
    parser.add_argument("--replay", help="file with a trace as printed, one action per line")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
