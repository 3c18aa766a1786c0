"""The paged engine: what runs in one worker between token ids in and token ids out.

Decisions (`blocks`, `prefix_index`, `allocation`, `sequence`, `scheduler`, `step`) are pure and import no torch;
`cache`, `batch`, `runner`, `sampler` and `models` hold the tensors; `engine` joins both; `llm` is the offline door.
The engine knows `kvferry.kv.connector`, never a transport.

`LLM` is loaded on first use, so that importing the pure parts costs no torch.
"""

from typing import TYPE_CHECKING

from kvferry.core.sampling import SamplingParams

if TYPE_CHECKING:
    from kvferry.engine.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name in {"LLM", "Completion"}:
        from kvferry.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
