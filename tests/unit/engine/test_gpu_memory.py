"""The part of a GPU's memory that is allocated for KV pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.engine.execute.gpu.memory import GpuMemory, activation_bytes, kv_budget
from kvferry.model import tiny

GIB = 1 << 30


def test_a_share_less_the_weights_and_the_steps() -> None:
    budget = kv_budget(GpuMemory(80 * GIB, 60 * GIB, 16 * GIB), 0.9, GIB)
    assert budget == int(0.9 * 80 * GIB) - 16 * GIB - GIB - (768 << 20)


@given(st.integers(1, 200), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1), st.integers(0, 8))
def test_the_budget_is_free_memory_within_the_share(total, free, own, share, step) -> None:
    memory = GpuMemory(total * GIB, int(free * total * GIB), int(own * total * GIB))
    try:
        budget = kv_budget(memory, share, step * GIB)
    except UsageError:
        return
    assert 0 < budget <= memory.free - step * GIB
    assert budget + memory.own + step * GIB <= share * memory.total


def test_a_gpu_that_the_weights_fill_is_refused_with_numbers_and_remedies() -> None:
    with pytest.raises(UsageError, match=r"81920 MiB, of which 0\.4 for this worker; 40960 MiB are weights") as caught:
        kv_budget(GpuMemory(80 * GIB, 30 * GIB, 40 * GIB), 0.4, GIB)
    assert caught.value.field == "gpu_memory_utilization"
    assert "Raise gpu_memory_utilization" in caught.value.message


def test_the_memory_of_a_step_grows_with_rows_and_logits() -> None:
    config = tiny.config()
    base = activation_bytes(config, rows=1, max_sequences=1)
    assert activation_bytes(config, rows=2, max_sequences=1) > base
    assert activation_bytes(config, rows=1, max_sequences=2) - base == 20 * config.vocab_size
