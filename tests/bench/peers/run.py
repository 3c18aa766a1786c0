"""kvferry beside vLLM, OpenVINO GenAI and llama.cpp on this machine's CPU: the same work, in turn, against its bounds.

    make bench-peers                                     all of it: over an hour on two idle cores, after installing
    make bench-peers ARGS="--rounds 1 --cells decode-1 --peers kvferry openvino"

Engines are installed once, each into an environment of its own under `--work`; llama.cpp is compiled, at the lowest
priority. Every engine is a process that loads once and sleeps between its turns. In each round, all engines run each
cell one after the other (A B C, A B C), beginning with another engine in each round; the machine's own rates are
measured just before. One round is not recorded. The modules in `adapters` describe the engines' settings. An engine
whose installation, start or answer fails or exceeds its time limit is left out with the reason, and the others
continue.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.machine import cpu_name
from peers import report
from peers.bounds import decode_share, prefill_share
from peers.cells import Cell, Trial, cells, wrong_counts
from peers.engines import ENGINES, THREADS, Engine, start
from peers.models import Models
from peers.protocol import Child, EngineFailed
from peers.report import Measured

from kvferry.bench.commit import commit
from kvferry.bench.roofline import MachineRates, measure_machine
from kvferry.core.clock import SystemClock
from kvferry.core.process.config import cache_dir
from kvferry.kernels import compiled

CLOCK = SystemClock()
RATIO = "prefix-16 warm/cold"


class Comparison:
    """The running engines and their measurements."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._models = Models(arguments.work / "models")
        self._measure = measure_machine((compiled.levels() or [""])[-1], THREADS, CLOCK)
        self._children: dict[str, Child] = {}
        self._engines: dict[str, Engine] = {}
        self._idle_since: dict[str, tuple[float, float]] = {}
        self.measured: list[Measured] = []
        self.machines: list[MachineRates] = []
        self.left_out: dict[str, str] = {}
        self.facts: dict[str, dict[str, object]] = {}
        self.idle_share: dict[str, float] = {}
        """Largest share of one core that an engine used during turns of others."""

    def start(self, engines: Sequence[Engine]) -> None:
        """Start the engines one after the other, so that no start slows another one."""
        refused: dict[str, str] = {}
        for engine in engines:
            try:
                if engine.peer in refused:
                    raise EngineFailed(refused[engine.peer])
                child = start(
                    engine,
                    self._arguments.work,
                    self._models,
                    install_seconds=self._arguments.install_seconds,
                    start_seconds=self._arguments.start_seconds,
                    clock=CLOCK,
                    say=say,
                )
            except EngineFailed as error:
                if "install" in str(error):
                    refused[engine.peer] = str(error)
                self._leave_out(engine.name, str(error))
                continue
            self._children[engine.name] = child
            self._engines[engine.name] = engine
            self.facts[engine.name] = {**child.facts, "start_seconds": round(child.start_seconds, 1)}

    def round(self, number: int, chosen: Sequence[Cell]) -> None:
        """Measure every cell with every engine; round 0 is not recorded."""
        for cell in chosen:
            machine = self._measure()
            if number:
                self.machines.append(machine)
            names = [n for n in self._children if self._engines[n].takes_arrivals or not cell.comes_over_time]
            turn = number % len(names) if names else 0
            trials = cell.trials(number)
            for name in names[turn:] + names[:turn]:
                say(f"round {number} of {self._arguments.rounds}: {cell.name}, {name}")
                try:
                    found = {
                        row + detail: value
                        for row, trial in trials.items()
                        for detail, value in self._ask(name, cell, trial).items()
                    }
                except EngineFailed as error:
                    self._leave_out(name, f"{cell.name}: {error}")
                    continue
                if number:
                    self.measured += [self._measured(number, row, name, cell, v, machine) for row, v in found.items()]

    def close(self) -> None:
        """Stop all engines."""
        for child in self._children.values():
            child.close()
        self._children.clear()

    def _ask(self, name: str, cell: Cell, trial: Trial) -> Mapping[str, float]:
        child = self._children[name]
        self._note_idle(name, child)
        if trial.before:
            child.ask(trial.before, self._arguments.cell_seconds)
        outcome = child.ask(trial.timed, self._arguments.cell_seconds)
        self._idle_since[name] = (CLOCK.monotonic(), child.cpu_seconds())
        wrong = wrong_counts(trial, outcome)
        if wrong:
            raise EngineFailed(wrong)
        return cell.rates(outcome)

    def _note_idle(self, name: str, child: Child) -> None:
        if name in self._idle_since:
            since, used = self._idle_since[name]
            passed = CLOCK.monotonic() - since
            if passed > 1.0:
                share = (child.cpu_seconds() - used) / passed
                self.idle_share[name] = max(self.idle_share.get(name, 0.0), share)

    def _measured(self, number: int, row: str, name: str, cell: Cell, value: float, machine: MachineRates) -> Measured:
        weight_class = self._engines[name].weight_class
        share = None
        if cell.reads_weights:
            share = decode_share(value, self._models.weight_bytes(weight_class), machine)
        elif cell.prefill_tokens and not name.endswith(report.FAST):  # the bound holds for exact products
            tokens = cell.prefill_tokens
            share = prefill_share(value, tokens, self._models.prefill_flop(tokens), machine)
        return Measured(number, row, name, weight_class, value, share, cell.unit)

    def _leave_out(self, name: str, reason: str) -> None:
        print(f"{name}: left out: {reason}", file=sys.stderr, flush=True)
        self.left_out[name] = reason
        child = self._children.pop(name, None)
        if child is not None:
            child.kill()


def say(text: str) -> None:
    """Print progress."""
    if sys.stderr.isatty():
        print(f"  {text}", file=sys.stderr, flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    known = cells()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cells:\n" + "\n".join(f"  {name:<13} {cell.about}" for name, cell in known.items()),
    )
    peers = list(dict.fromkeys(engine.peer for engine in ENGINES))
    parser.add_argument("--cells", nargs="+", choices=list(known), default=list(known), metavar="CELL")
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers, metavar="PEER", help=", ".join(peers))
    parser.add_argument("--rounds", type=_at_least_one, default=5, help="number of rounds (5)")
    parser.add_argument("--no-warm-up", action="store_true", help="skip the unrecorded round, to try out the command")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for rows, values of all rounds and reasons")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="CSV file to which rows are appended")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="folder of environments, models and logs (the cache's folder peers)"
    )
    parser.add_argument("--install-seconds", type=float, default=3600.0, help="seconds to install one peer (3600)")
    parser.add_argument("--start-seconds", type=float, default=600.0, help="seconds to start one engine (600)")
    parser.add_argument("--cell-seconds", type=float, default=900.0, help="seconds of one engine's turn (900)")
    arguments = parser.parse_args(words)
    arguments.work = (arguments.work or cache_dir() / "peers").absolute()
    return arguments


def main() -> None:
    arguments = parse()
    chosen = [cell for name, cell in cells().items() if name in arguments.cells]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    comparison = Comparison(arguments)
    try:
        comparison.start([engine for engine in ENGINES if engine.peer in arguments.peers])
        for number in range(1 if arguments.no_warm_up else 0, arguments.rounds + 1):
            comparison.round(number, chosen)
    except KeyboardInterrupt:
        print("interrupted: the rows measured until now follow", file=sys.stderr)
    finally:
        comparison.close()
    write(comparison, arguments, print)
    if not comparison.measured:
        sys.exit("nothing was measured")


def write(comparison: Comparison, arguments: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Print the table, and write the requested files."""
    measured = report.with_ratios(comparison.measured, "prefix-16 warm", "prefix-16 cold", RATIO)
    found = report.rows(measured, [engine.name for engine in ENGINES])
    about: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    bounds = {}
    if comparison.machines:
        bounds = {
            "read_gbps": report.Spread.of([machine.read_gbps for machine in comparison.machines]),
            "products_gflops": report.Spread.of([machine.gflops for machine in comparison.machines]),
        }
    show(report.markdown(found))
    show("")
    for name, spread in bounds.items():
        show(f"{name}: {spread.median:.1f} ({spread.least:.1f} to {spread.most:.1f})")
    for name, facts in comparison.facts.items():
        idle = f"{100 * comparison.idle_share[name]:.1f} % of a core" if name in comparison.idle_share else "not seen"
        show(f"{name}: {facts['version']}, started in {facts['start_seconds']} s; while others ran: {idle}")
    for name, reason in comparison.left_out.items():
        show(f"{name}: left out: {reason}")
    if arguments.csv is not None and found:
        report.append_csv(arguments.csv, found, about)
    if arguments.json is not None:
        whole = {
            **about,
            "rounds": arguments.rounds,
            "bounds": {name: asdict(spread) for name, spread in bounds.items()},
            "engines": comparison.facts,
            "idle_share_of_a_core": comparison.idle_share,
            "left_out": comparison.left_out,
            "rows": [asdict(row) for row in found],
            "values": [asdict(each) for each in measured],
        }
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    main()
