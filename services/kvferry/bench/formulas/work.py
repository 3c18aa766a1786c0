"""Roofline model: minimum time of a computation from its bytes and operations.

(Williams, Waterman and Patterson, Roofline, 2009.)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Bytes transferred and operations executed by a kernel or a whole step."""

    num_bytes: int
    flops: int = 0

    def seconds(self, *, gbps: float, gflops: float) -> float:
        """Return the minimum duration of the work in seconds.

        Args:
            gbps: memory rate in 10^9 bytes per second.
            gflops: compute rate in 10^9 operations per second.
        """
        return max(self.num_bytes / gbps, self.flops / gflops) / 1e9
