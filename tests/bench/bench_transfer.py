"""`kvferry bench transfer`, repeated, with rows in a CSV file: every connector against its bound.

make bench-transfer                                       rows appended to tests/bench/results/transfer.csv
make bench-transfer ARGS="--transport tcp-encrypted"      only that transport, in turn with plain tcp
"""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench import transfer
from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv, as_row
from kvferry.core.clock import SystemClock

RESULTS = Path(__file__).parent / "results" / "transfer.csv"
BLOCK_BYTES = 360 << 10
"""A page of the embedded model in bfloat16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--transport", action="append", choices=transfer.names())
    arguments = parser.parse_args()
    place = {"commit": commit(), "cpu": cpu_name()}
    rows: list[dict[str, object]] = []
    for _ in range(arguments.times):
        for name in arguments.transport or transfer.names():
            for count, scattered in ((1, False), (8, False), (8, True), (64, False), (64, True)):
                run = transfer.measure(
                    name, count, BLOCK_BYTES, scattered=scattered, rounds=arguments.rounds, clock=SystemClock()
                )
                date = datetime.now(UTC).isoformat(timespec="seconds")
                load = {"load_average": round(os.getloadavg()[0], 2)}
                rows.append({"date": date, **place, **as_row(run), **load})
                share = 100 * run.share_of_bound
                print(f"{name:<13} {count:>3} {scattered!s:<5} {run.gbps:6.2f} GB/s  {share:5.1f} %", flush=True)
    append_csv(RESULTS, rows)


if __name__ == "__main__":
    main()
