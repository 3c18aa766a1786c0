"""Inference engine with a paged KV cache and continuous batching: token ids in, token ids out.

`schedule` decides and is pure; `execute` holds the tensors; `observe` reports; `engine` combines them, `build` puts an
engine together from its settings, `loop` runs it on a thread, and `offline` is the API for Python programs. The engine
depends on `kvferry.kv.interface.connector`, never on a transport.

`LLM` and `AsyncLLM` are imported on first use, so that importing the pure parts does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

from kvferry.core.sampling import SamplingParams

if TYPE_CHECKING:
    from kvferry.core.inference.beams import BeamParams
    from kvferry.engine.offline.async_llm import AsyncLLM
    from kvferry.engine.offline.completion import BeamOutput, Completion, CompletionPart, Embedding
    from kvferry.engine.offline.llm import LLM

__all__ = ["LLM", "AsyncLLM", "BeamOutput", "BeamParams", "Completion", "CompletionPart", "Embedding", "SamplingParams"]
_MODULES = {
    "LLM": "kvferry.engine.offline.llm",
    "AsyncLLM": "kvferry.engine.offline.async_llm",
    "BeamOutput": "kvferry.engine.offline.completion",
    "BeamParams": "kvferry.core.inference.beams",
    "Completion": "kvferry.engine.offline.completion",
    "CompletionPart": "kvferry.engine.offline.completion",
    "Embedding": "kvferry.engine.offline.completion",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
