"""Inference engine with a paged KV cache and continuous batching: token ids in, token ids out.

Decisions (`blocks`, `plan`) are pure and do not import torch; `tensors`, `run`, `gpu` and `models` hold the tensors;
`loads` moves KV to and from peers and tiers; `engine` combines them; `llm` is the offline API. The engine depends on
`kvferry.kv.interface.connector`, never on a transport.

`LLM` is imported on first use, so that importing the pure parts does not import torch.
"""

from typing import TYPE_CHECKING

from kvferry.core.sampling import SamplingParams

if TYPE_CHECKING:
    from kvferry.engine.embedding import Embedding
    from kvferry.engine.llm import LLM, Completion

__all__ = ["LLM", "Completion", "Embedding", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name in {"LLM", "Completion"}:
        from kvferry.engine import llm

        return getattr(llm, name)
    if name == "Embedding":
        from kvferry.engine.embedding import Embedding

        return Embedding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
