"""Messages from the first rank of a model to the others, over a private socket pair."""

import socket
import struct
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.core.process.memory_file import MemoryPlace
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.kv.pages.layout import KvLayout

SOCKET_SECONDS = 15
"""How long a write of a message may wait for room in the socket, because the rank does not read."""
Packed = tuple[tuple[int, ...], bytes]
"""An array: shape, and values in C order, of a dtype that the field states."""


class ModelPlan(msgspec.Struct, frozen=True):
    """How every rank of a model loads and computes it."""

    model: str
    """See `EngineSettings`, as for the next three fields."""
    load_format: str
    max_model_len: int
    seed: int
    size: int
    """Number of ranks."""
    dtype: str
    """Data type of the KV."""
    form: str
    """Format of the weights under its name in the compiled kernels."""
    level: str
    """Level of the compiled kernels."""
    threads: int
    """Compute threads of each rank."""
    rounds_inputs: bool
    step_rows: int
    """Maximum number of rows of a step."""
    logit_rows: int
    """Maximum number of rows of a step whose logits are computed."""
    seconds: float
    """How long a rank waits for the others within a step."""


class RankStart(msgspec.Struct, frozen=True, tag=True):
    """The first message: what the rank loads."""

    plan: ModelPlan
    rank: int
    cores: tuple[int, ...]
    """CPU cores that the rank may use; empty for all."""
    sums: MemoryPlace
    """Memory for sums over ranks."""
    log_level: int


class RankPages(msgspec.Struct, frozen=True, tag=True):
    """Pages of an engine that will compute steps."""

    index: int
    """Number of the engine among those that share the model."""
    layout: KvLayout
    num_blocks: int
    pages: MemoryPlace
    """Memory that begins with the pages."""
    logits: MemoryPlace
    """Memory for the logits of the engine's steps, [logit_rows, vocabulary] float32."""


class RankAdapter(msgspec.Struct, frozen=True, tag=True):
    """A rank's share of an adapter that later steps use."""

    number: int
    updates: tuple[tuple[int, str, Packed, Packed], ...]
    """Layer, linear layer, A and B in float32."""
    forgotten: tuple[int, ...]
    """As in `RankStep`."""


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """A step to compute."""

    index: int
    """Number of the engine."""
    batch: tuple[Packed, ...]
    """The int64 arrays of the `StepBatch`, in the order of its fields."""
    adapters: tuple[int, ...]
    """Numbers of the step's adapters, in the order of `StepBatch.adapters`."""
    forgotten: tuple[int, ...]
    """Numbers of adapters that no later step uses."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RankStart` and `RankPages`."""

    error: str = ""
    """Why the rank cannot continue; empty if it can."""
    error_field: str = ""
    """Setting to which the error belongs; empty if it belongs to the model's files."""


Message = RankStart | RankPages | RankAdapter | RankStep | RankReady
_Kind = TypeVar("_Kind", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_OF_FIRST_RANK = ("hidden_rows", "tapped_layers", "adapters")
"""Fields of a batch that other ranks do not need: hidden states are returned by the first rank only."""
_ARRAYS = tuple(f.name for f in fields(StepBatch) if f.name not in _OF_FIRST_RANK)


def packed(values: npt.NDArray[np.generic]) -> Packed:
    """Return an array as a value of a message."""
    return values.shape, values.tobytes()


def unpacked(value: Packed, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return the array of `packed`, read-only."""
    shape, values = value
    found: npt.NDArray[np.generic] = np.frombuffer(values, dtype).reshape(shape)
    return found


def packed_batch(batch: StepBatch) -> tuple[Packed, ...]:
    """Return what other ranks need of a batch."""
    return tuple(packed(getattr(batch, name)) for name in _ARRAYS)


def unpacked_batch(values: Sequence[Packed]) -> StepBatch:
    """Return the batch of `packed_batch`."""
    arrays = {name: unpacked(value, np.int64) for name, value in zip(_ARRAYS, values, strict=True)}
    return StepBatch(**arrays)  # type: ignore[arg-type]  # every field is an int64 array


def socket_pair() -> tuple[Connection, socket.socket]:
    """Return this process's connection to a rank, and the socket for the rank's process. A write that takes longer than
    `SOCKET_SECONDS` raises BlockingIOError."""
    own, other = socket.socketpair()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SOCKET_SECONDS, 0))
    return Connection(own.detach()), other


def send(connection: Connection, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: the other process has ended or does not read.
    """
    connection.send_bytes(_encoder.encode(message))


def receive(connection: Connection, kind: type[_Kind]) -> _Kind:
    """Wait for a message of one kind; see `receive_any`."""
    message = receive_any(connection)
    assert isinstance(message, kind), f"received {type(message).__name__} instead of {kind.__name__}"
    return message


def receive_any(connection: Connection) -> Message:
    """Wait for a message.

    Raises:
        EOFError: the other process has ended.
    """
    return _decoder.decode(connection.recv_bytes())
