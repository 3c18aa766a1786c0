"""Measures a client's streams in windows of time, with and without another client beside it, in turn."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.siege.canary import Canary, p95
from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock

CLOCK = SystemClock()
WARM_UP_SECONDS = 5.0
PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class InTurn:
    """The latencies in both kinds of windows, and what the other client printed in each of its windows, as JSON."""

    alone: Canary = field(default_factory=Canary)
    beside: Canary = field(default_factory=Canary)
    outputs: list[Any] = field(default_factory=list)

    def rows(self) -> list[dict[str, object]]:
        """Return 95th percentiles in milliseconds, and their ratio.

        Raises:
            SystemExit: a stream failed.
        """
        failures = [*self.alone.failures, *self.beside.failures]
        if failures:
            raise SystemExit(f"{len(failures)} streams failed: {failures[0]}")
        rows: list[dict[str, object]] = []
        pairs = {
            "first token": (self.alone.first, self.beside.first),
            "between tokens": (self.alone.between, self.beside.between),
        }
        for name, (base, values) in pairs.items():
            before, after = 1e3 * p95(base), 1e3 * p95(values)
            rows.append({"measure": name, "p95_alone_ms": round(before, 3), "p95_beside_ms": round(after, 3)})
            print(f"{name:16} p95 {before:7.2f} ms alone, {after:7.2f} ms beside: {after / before:.2f}")
        return rows


async def _watch(grpc: str, key: str | None, seconds: float, canary: Canary) -> None:
    deadline = CLOCK.monotonic() + seconds
    async with AsyncClient(grpc, api_key=key) as client:
        while CLOCK.monotonic() < deadline:
            await canary.stream(client)
            await asyncio.sleep(PAUSE_SECONDS)


def measure_in_turn(
    grpc: str, other: Sequence[str], *, rounds: int, seconds: float, api_key: str | None = None
) -> InTurn:
    """Stream from a gateway in `2 * rounds` windows of `seconds`; the command `other` runs in every second window, ends
    by itself after that time and prints one line of JSON.
    """
    result = InTurn()
    asyncio.run(_watch(grpc, api_key, WARM_UP_SECONDS, Canary()))  # the first streams are slower
    for number in range(2 * rounds):
        has_other = bool(number % 2)
        process = subprocess.Popen(other, stdout=subprocess.PIPE, text=True) if has_other else None
        asyncio.run(_watch(grpc, api_key, seconds, result.beside if has_other else result.alone))
        if process is not None:
            result.outputs.append(json.loads(process.communicate(timeout=120)[0]))
    return result
