"""Latencies of streams while another client sends schemas that are large, deep or costly to compile.

    make bench-hostile-schemas                                  six windows of 10 seconds for each kind of request
    make bench-hostile-schemas ARGS="--rounds 8 --seconds 30"

A client streams short answers from `kvferry up`, one after another. In every second window another one sends requests
of a kind of `harness.siege.schemas` in turn, one every half second: those that are refused, those that are accepted and
costly, and for comparison requests without a constraint. Two figures: the longest time until a request is answered, and
the ratio of the first client's 95th percentiles with and without the other. Rows are appended to
tests/bench/results/hostile_schemas.csv.
"""

import argparse
import itertools
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
from harness.machine import cpu_name
from harness.servers.processes import running
from harness.siege.in_turn import measure_in_turn
from harness.siege.schemas import COSTLY, ORDINARY, REFUSED

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.process.priority import lower_priority

RESULTS = Path(__file__).parent / "results" / "hostile_schemas.csv"
CLOCK = SystemClock()
PAUSE_SECONDS = 0.5
KINDS = {"refused": REFUSED, "costly": COSTLY, "ordinary": ORDINARY}


def send(http: str, kind: str, seconds: float) -> dict[str, tuple[int, float]]:
    """Send the bodies in turn for some seconds; return the status and the longest time of each."""
    answers: dict[str, tuple[int, float]] = {}
    deadline = CLOCK.monotonic() + seconds
    with httpx.Client(base_url=f"http://{http}", headers={"content-type": "application/json"}, timeout=60) as client:
        for name in itertools.cycle(KINDS[kind]):
            begun = CLOCK.monotonic()
            status = client.post("/v1/completions", content=KINDS[kind][name]).status_code
            took = CLOCK.monotonic() - begun
            answers[name] = (status, max(took, answers.get(name, (0, 0.0))[1]))
            if CLOCK.monotonic() > deadline:
                return answers
            time.sleep(PAUSE_SECONDS)
    raise AssertionError("the cycle does not end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--send", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        http, kind, seconds = arguments.send
        lower_priority(10)  # a real client has a machine of its own
        print(json.dumps(send(http, kind, float(seconds))))
        return
    rows: list[dict[str, object]] = []
    flags = ("--threads", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
    with running("up", *flags) as stack:
        ready = stack.wait_for("ready")
        for kind, bodies in KINDS.items():
            sender = [sys.executable, __file__, "--send", str(ready["http"]), kind, str(arguments.seconds)]
            measured = measure_in_turn(str(ready["grpc"]), sender, rounds=arguments.rounds, seconds=arguments.seconds)
            print(f"beside requests that are {kind}:")
            answers = [answer for output in measured.outputs for answer in output.items()]
            slowest = max(seconds for _, (_, seconds) in answers)
            rows += [{"kind": kind, **row, "longest_answer_seconds": round(slowest, 3)} for row in measured.rows()]
            for name in bodies:
                of = [answer for answered, answer in answers if answered == name]
                statuses = sorted({status for status, _ in of})
                print(f"    {name:28} {max((seconds for _, seconds in of), default=0.0):6.2f} s   {statuses}")
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    append_csv(arguments.csv, [{**common, **row} for row in rows])


if __name__ == "__main__":
    main()
