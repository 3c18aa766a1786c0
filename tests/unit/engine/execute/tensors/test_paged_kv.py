"""Pages are contiguous, in any memory."""

import pytest
import torch

from kvferry.core.errors import UsageError
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

SHAPE = KvLayout.of(tiny.config(), block_tokens=4, dtype="bfloat16")


def test_bytes_of_a_page() -> None:
    assert SHAPE.block_bytes == 2 * 2 * 2 * 4 * 16 * 2  # layers, K and V, heads, tokens, values, bytes


def test_codes_have_a_scale_for_each_token_and_head() -> None:
    coded = KvLayout.of(tiny.config(), block_tokens=4, dtype="int8")
    assert coded.block_bytes == 2 * 2 * 2 * 4 * (16 + 4)


def test_a_page_is_one_range_of_the_buffer() -> None:
    buffer = bytearray(3 * SHAPE.block_bytes + 5)
    kv = PagedKv.over(SHAPE, buffer)
    assert kv.num_blocks == 3
    kv.pages[1] = 1.0
    one = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert bytes(buffer[SHAPE.block_bytes : 2 * SHAPE.block_bytes]) == one * (SHAPE.block_bytes // 2)
    assert not any(buffer[: SHAPE.block_bytes])
    assert not any(buffer[2 * SHAPE.block_bytes :])


def test_allocated_memory_is_zero_and_of_the_requested_size() -> None:
    kv = PagedKv.allocate(SHAPE, 5)
    assert kv.pages.shape == (5, 2, 2, 2, 4, 16)
    assert not kv.pages.any()


def test_a_buffer_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(UsageError, match="smaller than a page"):
        PagedKv.over(SHAPE, bytearray(SHAPE.block_bytes - 1))


def test_blocks_of_no_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="block_tokens must be positive"):
        KvLayout.of(tiny.config(), block_tokens=0, dtype="float32")
