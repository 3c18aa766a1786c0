"""Inference engine with a paged KV cache and continuous batching: token ids in, token ids out.

Decisions (`blocks`, `plan`) are pure and do not import torch; `tensors`, `run`, `gpu` and `models` hold the tensors;
`loads` moves KV to and from peers and tiers; `engine` combines them; `llm` is the offline API. The engine depends on
`kvferry.kv.interface.connector`, never on a transport.

`LLM` and `AsyncLLM` are imported on first use, so that importing the pure parts does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

from kvferry.core.sampling import SamplingParams

if TYPE_CHECKING:
    from kvferry.engine.async_llm import AsyncLLM
    from kvferry.engine.beams.beam_search import BeamOutput
    from kvferry.engine.completion import Completion, CompletionPart
    from kvferry.engine.embedding import Embedding
    from kvferry.engine.llm import LLM
    from kvferry.model.requests.beams import BeamParams

__all__ = ["LLM", "AsyncLLM", "BeamOutput", "BeamParams", "Completion", "CompletionPart", "Embedding", "SamplingParams"]
_MODULES = {
    "LLM": "kvferry.engine.llm",
    "AsyncLLM": "kvferry.engine.async_llm",
    "BeamOutput": "kvferry.engine.beams.beam_search",
    "BeamParams": "kvferry.model.requests.beams",
    "Completion": "kvferry.engine.completion",
    "CompletionPart": "kvferry.engine.completion",
    "Embedding": "kvferry.engine.embedding",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
