"""An engine's share of the machine's bounds, which `kvferry.bench.roofline` measures."""

from kvferry.bench.roofline import MachineRates


def decode_share(tokens_per_second: float, weight_bytes: int, machine: MachineRates) -> float:
    """Return the share of the memory read rate; every weight is read once per token."""
    return tokens_per_second * weight_bytes / (machine.read_gbps * 1e9)


def prefill_share(tokens_per_second: float, tokens: int, flop: float, machine: MachineRates) -> float:
    """Return the share of the arithmetic rate that a prompt with this number of operations reaches."""
    return tokens_per_second / tokens * flop / (machine.gflops * 1e9)
