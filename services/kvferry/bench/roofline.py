"""What this machine could do at most with a model: bytes it can read and products it can add, measured here and now.

a step reads every packed weight once, and the KV of every token of context
a row costs 2 operations for each weight that it meets, and 4 * heads * head_dim for each token that it sees
the bound of a step is the longer of  bytes / read rate  and  operations / product rate
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.bench.gpu.timing import CudaTimer, rates_of
from kvferry.bench.work import Work
from kvferry.core.clock import Clock
from kvferry.kernels import compiled
from kvferry.kernels.families import device_kind
from kvferry.model.config import ModelConfig
from kvferry.model.tensors import linear_weights

_READ_BYTES = 512 << 20
_ROUNDS = 3
_CHUNKS = 48


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of so many threads together."""

    read_gbps: float
    """10^9 bytes a second, from memory."""
    gflops: float
    """10^9 operations a second, in the form that the level multiplies."""
    threads: int
    level: str
    """Of the compiled kernels; empty: torch's own matrix product was timed."""

    def seconds(self, work: Work) -> float:
        """At least so long for some work."""
        return work.seconds(gbps=self.read_gbps, gflops=self.gflops)


def measure_machine(
    level: str, threads: int, clock: Clock, *, of_bytes: bool = False, device: str = "cpu"
) -> Callable[[], Machine]:
    """Something that measures when called; the memory it reads is made once.

    Args:
        level: a level of the compiled kernels; empty: use torch.
        threads: that work together.
        clock: what to measure with.
        of_bytes: products of 8-bit numbers, instead of what the level multiplies best.
        device: that computes, as torch names it. A GPU's rates are those of a copy and of a product in bfloat16.
    """
    if device_kind(device) == "cuda":
        where = torch.device(device)
        timer = CudaTimer(where, seconds=0.05)

        def by_events() -> Machine:
            rates = rates_of(where, timer)
            return Machine(rates.gbps, 1e3 * rates.tflops, threads, "")

        return by_events
    if not level:
        return lambda: _by_torch(threads, clock)
    module = compiled.extension()
    assert module is not None, "a level is there only with the module"
    pool = compiled.make_pool(threads)
    memory = compiled.Arena(_READ_BYTES).take(_READ_BYTES)
    memory[:] = 1

    def measure() -> Machine:
        read = flops = 0.0
        for _ in range(_ROUNDS):
            begun = clock.monotonic()
            module.read_all(pool, level, memory)
            read = max(read, _READ_BYTES / (clock.monotonic() - begun))
            begun = clock.monotonic()
            done = module.sum_products(pool, level, _CHUNKS, of_bytes)
            flops = max(flops, done / (clock.monotonic() - begun))
        return Machine(read / 1e9, flops / 1e9, threads, level)

    return measure


def _by_torch(threads: int, clock: Clock) -> Machine:
    memory, square = torch.ones(_READ_BYTES // 4), torch.ones(1024, 1024)
    read = flops = 0.0
    for _ in range(_ROUNDS):
        begun = clock.monotonic()
        memory.sum()
        read = max(read, _READ_BYTES / (clock.monotonic() - begun))
        begun = clock.monotonic()
        torch.mm(square, square)
        flops = max(flops, 2 * 1024**3 / (clock.monotonic() - begun))
    return Machine(read / 1e9, flops / 1e9, threads, "")


def step_work(
    config: ModelConfig, *, weight_bytes: int, kv_token_bytes: int, rows: int, seen: int, context: int, sampled: int
) -> Work:
    """One step.

    Args:
        config: the model.
        weight_bytes: of all packed weights.
        kv_token_bytes: KV of one token, all layers.
        rows: computed.
        seen: tokens that the rows see, added up over the rows.
        context: tokens whose KV is read, over all sequences.
        sampled: rows whose logits are computed.
    """
    head = config.vocab_size * config.hidden_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    flops = 2 * rows * linear_weights(config) + 2 * sampled * head + attention * seen
    return Work(weight_bytes + kv_token_bytes * context, flops)


def random_tokens(config: ModelConfig, count: int, seed: int) -> list[int]:
    """Token ids without meaning, the same for the same seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, config.vocab_size, count)]
