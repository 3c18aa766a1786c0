"""What streams notice of new weights: the gap in 8 streams of SmolLM2-135M while all workers change them.

PYTHONPATH=tests python tests/bench/bench_weights.py [--updates 5]
"""

import argparse
import json
import statistics
import threading
from pathlib import Path

import httpx
from harness.servers.processes import running

from kvferry.core.clock import SystemClock
from kvferry.model.catalog import CATALOG
from kvferry.model.fetch import fetch

STREAMS, TOKENS, SECONDS = 8, 1500, 600.0
MODEL = "smollm2-135m-instruct"


class Stream:
    """A stream and the time of each of its events."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self._number = url, number
        self.times: list[float] = []
        self.is_done = False
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        clock = SystemClock()
        sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"token_ids": [self._number + 5] * 256, "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", f"{self._url}/inference/v1/generate", json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(clock.monotonic())
        self.is_done = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=5)
    updates = parser.parse_args().updates
    file = Path(fetch(CATALOG[MODEL]))
    clock, wait = SystemClock(), threading.Event()
    flags = ("--model", MODEL, "--prefill", "1", "--decode", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    with running("up", *flags, "--json", "--weights-folder", str(file.parent)) as process:
        ready = process.wait_for("ready")
        url, admin = f"http://{ready['http']}", f"http://{ready['admin']}"
        streams = [Stream(url, number) for number in range(STREAMS)]
        while not all(len(stream.times) > 20 for stream in streams):
            wait.wait(0.05)
        rows: list[dict[str, float]] = []
        for number in range(updates):
            wait.wait(2.0)
            begun = clock.monotonic()
            body = {"path": file.name, "version": str(number)}
            httpx.post(f"{admin}/weights", json=body, timeout=SECONDS).raise_for_status()
            ended = clock.monotonic()
            while not all(stream.times[-1] > ended or stream.is_done for stream in streams):
                wait.wait(0.05)
            wait.wait(1.0)
            gaps = [
                max(
                    (b - a for a, b in zip(stream.times, stream.times[1:], strict=False) if a < ended + 1 and b > begun)
                )
                for stream in streams
                if stream.times[-1] > ended
            ]
            usual = [
                b - a
                for stream in streams
                for a, b in zip(stream.times, stream.times[1:], strict=False)
                if b < begun or a > ended + 10.0
            ]
            row = {
                "update_seconds": round(ended - begun, 3),
                "largest_gap_seconds": round(max(gaps), 3),
                "usual_gap_ms": round(1000 * statistics.median(usual), 1),
                "usual_gap_p99_ms": round(1000 * statistics.quantiles(usual, n=100)[98], 1),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
        pauses: list[float] = []
        for _ in range(updates):
            begun = clock.monotonic()
            httpx.post(f"{admin}/pause?mode=keep&clear_cache=false", timeout=SECONDS).raise_for_status()
            pauses.append(clock.monotonic() - begun)
            httpx.post(f"{admin}/resume", timeout=SECONDS).raise_for_status()
            wait.wait(0.5)
        print(json.dumps({"pause_ms": [round(1000 * one, 1) for one in pauses]}))
        print(json.dumps({"streams_running": sum(not stream.is_done for stream in streams)}))


if __name__ == "__main__":
    main()
