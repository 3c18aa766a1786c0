"""Mixtures of experts on the CPU: kvferry beside transformers and llama.cpp, in turn, against the bytes bound.

    make bench-moe                                    both shapes; rows appended to tests/bench/results/moe.csv
    make bench-moe ARGS="--shapes qwen3_moe --rounds 3 --engines kvferry llamacpp"

Every engine is a process with two threads that loads once and sleeps between its turns (`peers`); they take turns in
each round, from another first one each round. Checkpoints have random weights (`peers.mixtures`), equal in all engines
of a class of weights. One and eight streams: tokens per second after the first token. Prompt: tokens per second to the
first token. The bound of decoding is the bytes of the weights that a step reads, by the read rate measured just before;
with eight streams, the number of experts is its expectation for uniform choices. llama.cpp is compiled on first use.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.machine import cpu_name
from peers import report
from peers.cells import Request, Trial, wrong_counts
from peers.engines import THREADS, Engine, start
from peers.mixtures import SHAPES, VOCABULARY, Mixtures, step_bytes
from peers.protocol import Child, EngineFailed
from peers.report import Measured

from kvferry.bench.commit import commit
from kvferry.bench.roofline import MachineRates, measure_machine
from kvferry.core.clock import SystemClock
from kvferry.core.process.config import cache_dir
from kvferry.kernels import compiled

RESULTS = Path(__file__).parent / "results" / "moe.csv"
CLOCK = SystemClock()
PROMPT, SHORT, STEPS = 512, 32, 32
DECODE = {"decode-1": 1, "decode-8": 8}
"""Number of streams of each cell that decodes."""
SECONDS = 600.0
_TORCH = {"OMP_NUM_THREADS": str(THREADS)}
_CONTEXTS = {"shapes": [[1, 1024], [8, 256]]}
ENGINES = (
    Engine("kvferry-bf16", "kvferry", "16-bit", "kvferry_engine", "folder"),
    *(
        Engine(f"transformers-{experts}", "transformers", "16-bit", "transformers_engine", "folder", more, _TORCH)
        for experts, more in (("grouped", {"experts": "grouped_mm"}), ("eager", {"experts": "eager"}))
    ),
    Engine("llamacpp-bf16", "llamacpp", "16-bit", "llamacpp_engine", "bf16", _CONTEXTS),
    Engine("llamacpp-f16", "llamacpp", "16-bit", "llamacpp_engine", "f16", _CONTEXTS),
    Engine("kvferry-q4", "kvferry", "4-bit", "kvferry_engine", "packed"),
    Engine("kvferry-q4-fast", "kvferry", "4-bit", "kvferry_engine", "packed", {"numerics": "fast"}),
    Engine("llamacpp-q4_0", "llamacpp", "4-bit", "llamacpp_engine", "q4_0", _CONTEXTS),
)


def trial(cell: str, number: int) -> Trial:
    """Return the requests of a cell, which differ between rounds."""
    draw = random.Random(f"{cell} {number}")
    streams = DECODE.get(cell, 1)
    length, new_tokens = (SHORT, STEPS + 1) if cell in DECODE else (PROMPT, 1)
    requests = [tuple(draw.randrange(300, VOCABULARY) for _ in range(length)) for _ in range(streams)]
    return Trial(tuple(Request(tokens, new_tokens) for tokens in requests))


class Turns:
    """The running engines of one shape and their measurements."""

    def __init__(self, shape: str, mixtures: Mixtures) -> None:
        self._shape, self._mixtures = shape, mixtures
        self._children: dict[str, Child] = {}
        self._engines = {engine.name: engine for engine in ENGINES}
        self.measured: list[Measured] = []
        self.read_gbps: list[float] = []

    def start(self, engines: Sequence[Engine], work: Path) -> None:
        """Start the engines; one that fails is reported and left out."""
        for engine in engines:
            try:
                self._children[engine.name] = start(
                    engine,
                    work,
                    self._mixtures,
                    install_seconds=3600.0,
                    start_seconds=SECONDS,
                    clock=CLOCK,
                    say=say,
                )
            except EngineFailed as error:
                say(f"{engine.name}: left out: {error}")

    def round(self, number: int, cells: Sequence[str], measure: Callable[[], MachineRates]) -> None:
        """Measure all cells with all engines; round 0 is not recorded."""
        names = list(self._children)
        turn = number % len(names)
        for cell in cells:
            asked, machine = trial(cell, number), measure()
            self.read_gbps.append(machine.read_gbps)
            for name in names[turn:] + names[:turn]:
                try:
                    outcome = self._children[name].ask(asked.timed, SECONDS)
                    if wrong := wrong_counts(asked, outcome):
                        raise EngineFailed(wrong)
                except EngineFailed as error:
                    say(f"{name}: left out: {cell}: {error}")
                    self._children.pop(name).kill()
                    names.remove(name)
                    continue
                weights, share = self._engines[name].weight_class, None
                if cell in DECODE:
                    streams = DECODE[cell]
                    value = (outcome.output_tokens - streams) / (outcome.seconds - outcome.first_seconds)
                    steps = value / streams
                    share = steps * step_bytes(self._mixtures.config, weights, streams) / (machine.read_gbps * 1e9)
                else:
                    value = outcome.input_tokens / outcome.seconds
                if number:
                    self.measured.append(Measured(number, f"{self._shape} {cell}", name, weights, value, share))

    def close(self) -> None:
        """Stop all engines."""
        for child in self._children.values():
            child.close()


def say(text: str) -> None:
    """Print progress."""
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    peers = list(dict.fromkeys(engine.peer for engine in ENGINES))
    cells = [*DECODE, f"prefill-{PROMPT}"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=peers, default=peers, help="default: all")
    parser.add_argument("--cells", nargs="+", choices=cells, default=cells, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="folder of the peers' environments")
    parser.add_argument("--models", type=Path, help="folder in which checkpoints are kept; default: a temporary one")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    given = parser.parse_args()
    level = (compiled.levels() or [""])[-1]
    measure = measure_machine(level, THREADS, CLOCK)
    measured: list[Measured] = []
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        for shape in given.shapes:
            turns = Turns(shape, Mixtures(shape, given.models or Path(place)))
            try:
                turns.start([engine for engine in ENGINES if engine.peer in given.engines], given.work)
                for number in range(given.rounds + 1):
                    turns.round(number, given.cells, measure)
            finally:
                turns.close()
            measured += turns.measured
            rates += turns.read_gbps
    found = report.rows(measured, [engine.name for engine in ENGINES])
    print(report.markdown(found))
    load = round(os.getloadavg()[0], 2)
    reads = f"reads {statistics.median(rates):.1f} GB/s ({min(rates):.1f} to {max(rates):.1f})"
    print(f"{level}; {reads}; load average {load}")
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "load_average": load,
    }
    report.append_csv(given.csv, found, about)


if __name__ == "__main__":
    main()
