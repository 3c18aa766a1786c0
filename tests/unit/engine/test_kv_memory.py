"""Number of tokens that the KV memory holds, and refused sizes."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine.build import load_model

PAGE = 8192
"""Bytes of a page of 16 tokens of the tiny model in float32."""


def num_blocks(kv_bytes: int, max_model_len: int = 0) -> int:
    settings = EngineSettings(model="tiny", dtype="float32", kv_memory=kv_bytes, max_model_len=max_model_len, threads=1)
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
    assert "set kv_memory to at least 1MiB, or reduce max_model_len" in e.value.message
    assert num_blocks(32 * PAGE, max_model_len=512) == 32
    with pytest.raises(UsageError, match="a server needs 513"):
        num_blocks(32 * PAGE, max_model_len=513)


def test_an_offline_engine_may_have_less() -> None:
    settings = EngineSettings(model="tiny", dtype="float32", kv_memory=2 * PAGE, threads=1)
    assert load_model(settings).num_blocks == 2
