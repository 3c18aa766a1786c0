"""A line of a request trace, in the format that `bench.workload.traces` reads.

    {"timestamp": 1764083100123, "input_length": 40, "output_length": 9, "block_tokens": 16, "hash_ids": [81, 7, 95]}

The format is Mooncake's (Qin et al., Mooncake, 2024, section 4), extended by the field `block_tokens`. `hash_ids` then
has one id for each full block of prompt and output together, so that the next turn of a conversation shares the blocks
of the answer, as it does in the workers' caches.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.hashing import BlockNamers

BLOCK_TOKENS = 16
_FINGERPRINT = b"request trace"
_ID_BYTES = 6
"""48 bits: two of a million blocks share an id with a probability of 0.2 %."""


@dataclass(frozen=True, slots=True)
class TracedSample:
    """Input of a line."""

    at: float
    """Arrival, seconds since the Unix epoch."""
    prompt: Sequence[int]
    output: Sequence[int]
    scope: str
    """Scope of the sample's KV; blocks of two scopes have different ids."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.prompt) + len(self.output)


def trace_line(sample: TracedSample, namers: BlockNamers) -> str:
    """Return the line of a sample, with its line break.

    Args:
        sample: the sample.
        namers: namers under the trace's key; without the key, an id does not reveal whether particular text was sent.
    """
    namer = namers.of(sample.scope, fingerprint=_FINGERPRINT, block_tokens=BLOCK_TOKENS)
    names = namer.chain([*sample.prompt, *sample.output])
    entry = {
        "timestamp": round(sample.at * 1000.0),
        "input_length": len(sample.prompt),
        "output_length": len(sample.output),
        "block_tokens": BLOCK_TOKENS,
        "hash_ids": [int.from_bytes(name[:_ID_BYTES], "big") for name in names],
    }
    return json.dumps(entry, separators=(",", ":")) + "\n"
