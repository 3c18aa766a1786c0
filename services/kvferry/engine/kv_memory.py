"""Memory for the KV pages of an engine, by its settings and its device."""

from kvferry.core.errors import UsageError
from kvferry.core.process.memory import usable_memory
from kvferry.engine.settings import DEFAULT_KV_BYTES, EngineSettings
from kvferry.engine.tensors.device import CPU
from kvferry.model.config import ModelConfig


def kv_memory(settings: EngineSettings, config: ModelConfig, device: str) -> int:
    """Return the memory for KV pages: as set, or by the device.

    Raises:
        UsageError: the machine does not have as much, or the weights leave none on a GPU.
    """
    if device == CPU:
        wanted, most = settings.kv_bytes or DEFAULT_KV_BYTES, usable_memory()
        if wanted > most:
            raise UsageError(
                f"kv_memory of {wanted} bytes exceeds the {most} bytes of memory that this process may have; set "
                "kv_memory to less",
                field="kv_memory",
            )
        return wanted
    if settings.kv_bytes:
        return settings.kv_bytes
    import torch

    from kvferry.engine.gpu.memory import GpuMemory, activation_bytes, kv_budget

    free, total = torch.cuda.mem_get_info()
    limits = settings.limits
    step_bytes = activation_bytes(config, rows=limits.token_budget, max_sequences=limits.max_sequences)
    found = GpuMemory(total, free, torch.cuda.memory_reserved())
    return kv_budget(found, settings.gpu_memory_share, step_bytes)
