"""The client library: blocking and asynchronous gRPC clients of a gateway, or of a worker of role `both`.

from kvferry.client import Client, SamplingParams

with Client("127.0.0.1:9000") as client:
    for chunk in client.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16)):
        print(chunk.text, end="", flush=True)
"""

from kvferry.client.asynchronous import AsyncClient
from kvferry.client.blocking import Client
from kvferry.client.client_tls import ClientTls
from kvferry.client.messages import Completion, ModelInfo, Prompt
from kvferry.client.responses import Embedding
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import KvferryError
from kvferry.core.inference.beams import BeamParams
from kvferry.core.inference.chunks import TextChunk
from kvferry.core.inference.tool_calls import CallDelta, ToolCall
from kvferry.core.inference.tools import Tool
from kvferry.core.retention import CacheHints, Retention, RetentionOutcome
from kvferry.core.sampling import FinishReason, SamplingParams

__all__ = [
    "AsyncClient",
    "BeamParams",
    "CacheHints",
    "CallDelta",
    "Client",
    "ClientTls",
    "Completion",
    "Constraint",
    "ConstraintKind",
    "Embedding",
    "FinishReason",
    "KvferryError",
    "ModelInfo",
    "Prompt",
    "Retention",
    "RetentionOutcome",
    "SamplingParams",
    "TextChunk",
    "Tool",
    "ToolCall",
]
