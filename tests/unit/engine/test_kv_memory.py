"""Number of tokens that the KV memory holds, and refused sizes."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.engine.build import load_model
from kvferry.engine.settings import EngineSettings

PAGE = 8192
"""Bytes of a page of 16 tokens of the tiny model in float32."""


def num_blocks(kv_bytes: int, max_model_tokens: int = 0) -> int:
    settings = EngineSettings(
        model="tiny", dtype="float32", kv_bytes=kv_bytes, max_model_tokens=max_model_tokens, threads=1
    )
    loaded = load_model(settings)
    loaded.check_serves()
    return loaded.num_blocks


def test_memory_for_fewer_than_1024_tokens_is_refused_unless_the_context_is_shorter() -> None:
    assert num_blocks(64 * PAGE) == 64
    with pytest.raises(
        UsageError, match=r"kv_memory of 524287 bytes holds the KV of only 1008 tokens, and a server needs 1,024"
    ) as e:
        num_blocks(64 * PAGE - 1)
    assert e.value.field == "kv_memory"
    assert "set kv_memory to at least 1MiB, or reduce max_model_tokens" in e.value.message
    assert num_blocks(32 * PAGE, max_model_tokens=512) == 32
    with pytest.raises(UsageError, match="a server needs 513"):
        num_blocks(32 * PAGE, max_model_tokens=513)


def test_an_offline_engine_may_have_less() -> None:
    settings = EngineSettings(model="tiny", dtype="float32", kv_bytes=2 * PAGE, threads=1)
    assert load_model(settings).num_blocks == 2
