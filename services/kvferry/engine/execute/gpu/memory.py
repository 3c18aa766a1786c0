"""GPU memory for the KV pages of an engine."""

from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.kernels.latent_limits import scratch_bytes
from kvferry.weights.config import ModelConfig

_MIB = 1 << 20
_WORKSPACE_BYTES = 768 * _MIB
"""Memory reserved for the driver's context, library workspaces and captured graphs, in bytes."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes."""

    total: int
    free: int
    """Memory not used by any process."""
    own: int
    """Memory used by this process: the weights."""


def activation_bytes(config: ModelConfig, *, rows: int, max_sequences: int) -> int:
    """Return an upper bound on the memory of one step's intermediate results.

    Args:
        config: the model's shape.
        rows: maximum number of tokens in a step.
        max_sequences: maximum number of rows with logits, which the sampler also needs in float64.
    """
    per_row = 4 * config.hidden_size + 2 * config.projected_heads * config.head_dim + config.inner_values
    needed = 4 * rows * per_row + 20 * max_sequences * config.vocab_size
    if config.latent is not None:
        rank = config.latent.rank
        needed += 4 * rows * (2 * (config.latent.query_rank or 0) + 2 * config.latent.width)
        needed += scratch_bytes(rows, config.num_heads, rank=rank, value_bytes=4)
    return needed


def kv_budget(memory: GpuMemory, share: float, step_bytes: int) -> int:
    """Return the bytes for KV pages: a share of the GPU's memory, less the weights and the memory of a step, and at
    most the free memory.

    Args:
        memory: the GPU's memory after the weights were loaded.
        share: share of the memory for this engine, weights included, 0 to 1.
        step_bytes: memory of a step's intermediate results; see `activation_bytes`.

    Raises:
        UsageError: nothing is left.
    """
    reserved = step_bytes + _WORKSPACE_BYTES
    budget = min(int(share * memory.total) - memory.own, memory.free) - reserved
    if budget <= 0:
        raise UsageError(
            f"no memory is left for KV on the GPU: {memory.total // _MIB} MiB, of which {share:g} for this worker; "
            f"{memory.own // _MIB} MiB are weights, {reserved // _MIB} MiB are reserved for steps, and "
            f"{memory.free // _MIB} MiB are free. Raise gpu_memory_utilization, lower token_budget, or use a "
            "smaller model",
            field="gpu_memory_utilization",
        )
    return budget
