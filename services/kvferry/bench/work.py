"""What a computation cannot do without: bytes that must move, operations that must be done, and so its shortest time.

(Williams, Waterman and Patterson, Roofline, 2009.)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Of a kernel, or of a whole step."""

    num_bytes: int
    flops: int = 0

    def seconds(self, *, gbps: float, gflops: float) -> float:
        """At least so long.

        Args:
            gbps: 10^9 bytes that can be moved in a second.
            gflops: 10^9 operations that can be done in a second.
        """
        return max(self.num_bytes / gbps, self.flops / gflops) / 1e9
