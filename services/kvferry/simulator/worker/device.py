"""Device profile: the duration of a step as a function of its work.

    seconds = step + token x tokens + kv_token x KV tokens read + pair x (token, earlier token) pairs

A step reads the weights once (`step`), multiplies them by each of its tokens (`token`), and reads the KV of each of its
sequences once (`kv_token`; Kwon, "vLLM: an efficient inference engine for large language models", 2025, section 2.1).
Attention of a prompt also computes a term for each pair of a token and an earlier one (`pair`), which matters for long
prompts on a device with slow arithmetic.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvferry.core.errors import UsageError
from kvferry.engine.schedule.step.step import ScheduledSequence

_MAX_SECONDS = 3600.0


class StepWork(NamedTuple):
    """Work of one step."""

    tokens: int
    """Number of tokens that are computed."""
    kv_tokens: int
    """Number of tokens whose KV is read, over all sequences, including the step's own tokens."""
    pairs: int = 0
    """Number of pairs of a prompt token of the step and a token up to it, over the sequences that compute several
    tokens."""


def work_of(scheduled: Iterable[ScheduledSequence]) -> StepWork:
    """Return the work of a planned step."""
    tokens = kv_tokens = pairs = 0
    for item in scheduled:
        count = item.num_scheduled
        tokens += count
        kv_tokens += item.num_computed + count
        if count > 1:
            pairs += count * item.num_computed + count * (count + 1) // 2
    return StepWork(tokens, kv_tokens, pairs)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Coefficients of a device with a model, in seconds."""

    step: float
    """Fixed time of every step in seconds: reading weights, launching, and the host's part."""
    token: float
    kv_token: float
    pair: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: a coefficient is negative or not finite, or all are zero.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            if not (math.isfinite(value) and 0.0 <= value <= _MAX_SECONDS):
                raise UsageError(
                    f"device.{one.name} must be between 0 and {_MAX_SECONDS:g} seconds, not {value}",
                    field=f"device.{one.name}",
                )
        if self.step == 0.0 and self.token == 0.0:
            raise UsageError("device.step and device.token are both 0; a step must take time", field="device.step")

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step in seconds."""
        return self.step + self.token * work.tokens + self.kv_token * work.kv_tokens + self.pair * work.pairs


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Network between workers, and between a worker and the gateway."""

    bytes_per_second: float = 1.25e9
    """Rate of a worker's link in each direction; a worker's transfers run one after another."""
    latency: float = 0.0002
    """Latency of a message in one direction, in seconds."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: a value is out of range.
        """
        if not 1.0 <= self.bytes_per_second <= 1e15:
            raise UsageError(
                f"link.bytes_per_second must be between 1 and 1e15, not {self.bytes_per_second}",
                field="link.bytes_per_second",
            )
        if not 0.0 <= self.latency <= 60.0:
            raise UsageError(f"link.latency must be between 0 and 60 seconds, not {self.latency}", field="link.latency")
