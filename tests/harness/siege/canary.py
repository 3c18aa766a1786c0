"""A small client that measures the latencies of its streams while others load or attack a stack."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.client import AsyncClient
from kvferry.core.clock import SystemClock
from kvferry.core.sampling import SamplingParams

CLOCK = SystemClock()
SAMPLING = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@dataclass
class Canary:
    """Latencies of small streams, one after another, in seconds."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    """Seconds from the first token to the second, with the hand-off in between."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between later tokens."""
    failures: list[str] = field(default_factory=list)

    @property
    def between(self) -> list[float]:
        """Seconds between two tokens, with and without a hand-off in between."""
        return [*self.second, *self.gaps]

    async def stream(self, client: AsyncClient) -> None:
        """Generate one stream and measure it."""
        last = CLOCK.monotonic()
        begun, num_chunks = last, 0
        try:
            async for chunk in client.generate("The ferry", SAMPLING, timeout=60):
                now = CLOCK.monotonic()
                if chunk.tokens:
                    of = (self.first, self.second)[num_chunks] if num_chunks < 2 else self.gaps
                    of.append(now - begun if of is self.first else (now - last) / len(chunk.tokens))
                    num_chunks += 1
                last = now
        except Exception as error:
            self.failures.append(str(error)[:200])


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else float("inf")
