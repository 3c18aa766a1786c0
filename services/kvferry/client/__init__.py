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
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import KvferryError
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.serving.text_stream import TextChunk
from kvferry.serving.token_source import Vector
from kvferry.text.answers.pieces import CallDelta, ToolCall
from kvferry.text.requests.beams import BeamParams
from kvferry.text.tools.definitions import Tool

__all__ = [
    "AsyncClient",
    "BeamParams",
    "CallDelta",
    "Client",
    "ClientTls",
    "Completion",
    "Constraint",
    "ConstraintKind",
    "FinishReason",
    "KvferryError",
    "ModelInfo",
    "Prompt",
    "SamplingParams",
    "TextChunk",
    "Tool",
    "ToolCall",
    "Vector",
]
