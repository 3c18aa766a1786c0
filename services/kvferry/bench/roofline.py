"""Roofline of a model on this machine: measured memory and compute rates, and the minimum time of steps.

a step reads every packed weight once and the KV of every context token
a row takes 2 operations per weight and 4 * heads * head_dim per visible token
the bound of a step is  max(bytes / read rate, operations / product rate)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.gpu.timing import CudaTimer, rates_of
from kvferry.core.clock import Clock
from kvferry.kernels import compiled
from kvferry.kernels.backends import device_kind
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import linear_weights

_READ_BYTES = 512 << 20
_ROUNDS = 3
_CHUNKS = 48


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured rates of the machine with `threads` threads."""

    read_gbps: float
    """Memory read rate in 10^9 bytes per second."""
    gflops: float
    """Compute rate in 10^9 operations per second, in the number format of `level`."""
    threads: int
    level: str
    """Instruction level of the compiled kernels; empty if the rates were measured with torch."""

    def seconds(self, work: KernelWork) -> float:
        """Return the minimum duration of `work` on this machine in seconds."""
        return work.seconds(gbps=self.read_gbps, gflops=self.gflops)


def measure_machine(
    level: str, threads: int, clock: Clock, *, of_bytes: bool = False, device: str = "cpu"
) -> Callable[[], MachineRates]:
    """Allocate memory for measuring the machine's rates, and return a function that measures them once.

    Args:
        level: instruction level of the compiled kernels; empty selects torch.
        threads: number of threads.
        clock: clock of the measurement.
        of_bytes: whether to measure 8-bit matrix products instead of products in the level's format.
        device: torch device. On a GPU, a copy and a bfloat16 matrix product are measured.
    """
    if device_kind(device) == "cuda":
        where = torch.device(device)
        timer = CudaTimer(where, seconds=0.05)

        def by_events() -> MachineRates:
            rates = rates_of(where, timer)
            return MachineRates(rates.gbps, 1e3 * rates.tflops, threads, "")

        return by_events
    if not level:
        return lambda: _by_torch(threads, clock)
    module = compiled.extension()
    assert module is not None, "a level needs the compiled module"
    pool = compiled.make_pool(threads)
    memory = compiled.Arena(_READ_BYTES).take(_READ_BYTES)
    memory[:] = 1

    def measure() -> MachineRates:
        read = flops = 0.0
        for _ in range(_ROUNDS):
            begun = clock.monotonic()
            module.read_all(pool, level, memory)
            read = max(read, _READ_BYTES / (clock.monotonic() - begun))
            begun = clock.monotonic()
            done = module.sum_products(pool, level, _CHUNKS, of_bytes)
            flops = max(flops, done / (clock.monotonic() - begun))
        return MachineRates(read / 1e9, flops / 1e9, threads, level)

    return measure


def _by_torch(threads: int, clock: Clock) -> MachineRates:
    memory, square = torch.ones(_READ_BYTES // 4), torch.ones(1024, 1024)
    read = flops = 0.0
    for _ in range(_ROUNDS):
        begun = clock.monotonic()
        memory.sum()
        read = max(read, _READ_BYTES / (clock.monotonic() - begun))
        begun = clock.monotonic()
        torch.mm(square, square)
        flops = max(flops, 2 * 1024**3 / (clock.monotonic() - begun))
    return MachineRates(read / 1e9, flops / 1e9, threads, "")


def step_work(
    config: ModelConfig, *, weight_bytes: int, kv_token_bytes: int, rows: int, seen: int, context: int, sampled: int
) -> KernelWork:
    """Return the minimum number of bytes and operations of a step.

    Args:
        config: the model's shape.
        weight_bytes: bytes of all packed weights.
        kv_token_bytes: KV bytes per token over all layers.
        rows: number of rows computed.
        seen: number of tokens that each row attends to, summed over all rows.
        context: number of tokens whose KV is read, over all sequences.
        sampled: number of rows whose logits are computed.
    """
    head = config.vocab_size * config.hidden_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    flops = 2 * rows * linear_weights(config) + 2 * sampled * head + attention * seen
    return KernelWork(weight_bytes + kv_token_bytes * context, flops)


def random_tokens(config: ModelConfig, count: int, seed: int) -> list[int]:
    """Generate random token ids, deterministic for `seed`."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, config.vocab_size, count)]
