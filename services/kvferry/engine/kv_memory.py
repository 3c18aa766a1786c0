"""KV memory of an engine, and whether pages behind windows are released, according to its settings."""

from kvferry.core.errors import UsageError
from kvferry.core.process.memory import usable_memory
from kvferry.core.settings.engine import AUTO, DEFAULT_KV_BYTES, KEEP, RELEASE, EngineSettings
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.tensors.device import CPU
from kvferry.kv.pages.layer_groups import FULL_ATTENTION, choose_groups
from kvferry.weights.config import ModelConfig


def kv_memory(settings: EngineSettings, config: ModelConfig, device: str) -> int:
    """Return the KV memory in bytes, as set or by the device's default.

    Args:
        settings: the engine's settings; `kv_memory` overrides the default.
        config: configuration of the model.
        device: torch device name, for example `cpu` or `cuda:0`.

    Raises:
        UsageError: the machine does not have that much memory, or the weights leave none on a GPU.
    """
    if device == CPU:
        num_bytes, limit = settings.kv_memory or DEFAULT_KV_BYTES, usable_memory()
        if num_bytes > limit:
            raise UsageError(
                f"kv_memory (--kv-memory) must be at most this process's memory limit of {limit >> 20}MiB, "
                f"not {num_bytes >> 20}MiB",
                field="kv_memory",
            )
        return num_bytes
    if settings.kv_memory:
        return settings.kv_memory
    import torch

    from kvferry.engine.execute.gpu.memory import GpuMemory, activation_bytes, kv_budget

    free, total = torch.cuda.mem_get_info()
    limits = settings.limits
    step_bytes = activation_bytes(config, rows=limits.token_budget, max_sequences=limits.max_num_seqs)
    found = GpuMemory(total, free, torch.cuda.memory_reserved())
    return kv_budget(found, settings.gpu_memory_utilization, step_bytes)


def releases_window_pages(settings: EngineSettings, model: Model, context_tokens: int, *, is_default: bool) -> bool:
    """Return whether pages behind sliding windows are released: as set, provided that it saves memory.

    Args:
        settings: the engine's settings.
        model: the model.
        context_tokens: context length that is served.
        is_default: whether `auto` releases pages on CPUs.

    Raises:
        UsageError: the kernels cannot release pages.
    """
    setting = settings.window_pages
    if setting == RELEASE and not model.has_layer_groups:
        raise UsageError(
            f"the {model.kernels} kernels need all pages of a sequence of {model.config.name}; set window_pages to "
            f"{KEEP!r}",
            field="window_pages",
        )
    is_default = is_default and model.device == CPU
    if setting == KEEP or (setting == AUTO and not is_default) or not model.has_layer_groups:
        return False
    groups = choose_groups(
        model.config,
        context_tokens=context_tokens,
        block_tokens=settings.block_tokens,
        step_tokens=settings.limits.step_tokens,
    )
    return groups.windows != FULL_ATTENTION
