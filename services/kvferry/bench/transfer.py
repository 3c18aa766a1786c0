"""`kvferry bench transfer`: page reads between two processes by transport, compared with a lower-level bound.

transport      bound, measured in the same rounds
memory, shm    memory copy of the same bytes on one thread
nixl           plain NIXL with the same number of pages
tcp            the same bytes over one loopback connection, in large chunks
tcp-encrypted  the same read over tcp without encryption
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from kvferry.bench import bounds
from kvferry.bench.sampling import alternate
from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable
from kvferry.core.ids import BlockId, Incarnation, WorkerId, new_incarnation
from kvferry.kv import registry
from kvferry.kv.interface.connector import Peer, Transport, TransportSetup

_SETUP = TransportSetup(secrets=(b"a secret that only guards numbers",))
_ENCRYPTED = "tcp-encrypted"
_START_SECONDS = 30.0
_READ_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TransferRun:
    """Result of one transport with a given number of pages."""

    transport: str
    num_blocks: int
    block_bytes: int
    is_scattered: bool
    """Whether every second page of the peer is read, so that no two pages are contiguous."""
    ms: float
    ms_least: float
    ms_most: float
    gbps: float
    """Median rate in 10^9 bytes per second."""
    bound_gbps: float
    """Median rate of the transfer with which it is compared."""
    share_of_bound: float
    """Ratio of the two rates; above 1 if the transport is faster."""
    bound: str = ""
    """Name of the transfer with which it is compared."""


def names() -> list[str]:
    """Return the names of the transports that can be measured: the connectors, and those with encryption."""
    return sorted([*registry.names(), _ENCRYPTED])


def _open(name: str, incarnation: Incarnation) -> Transport:
    encrypts = name == _ENCRYPTED
    return registry.open_transport("tcp" if encrypts else name, incarnation, replace(_SETUP, encrypts=encrypts))


@contextmanager
def pages_of_another_process(name: str, num_blocks: int, block_bytes: int) -> Iterator[tuple[Transport, Peer]]:
    """Yield a transport connected to a peer with pages; the peer is a second process, except for `memory`.

    Args:
        name: name of the transport, one of `names()`.
        num_blocks: number of pages on each side.
        block_bytes: bytes per page.

    Raises:
        UsageError: the transport is not available on this machine.
        ReadError: the connection failed.
        Unavailable: the second process did not start in time.
    """
    ours = _open(name, new_incarnation())
    process = None
    try:
        memory = ours.allocate(num_blocks, block_bytes)
        memory.pages[:] = b"\x02" * len(memory.pages)
        if name == "memory":
            theirs = _open(name, new_incarnation())
            theirs.allocate(num_blocks, block_bytes).pages[:] = b"\x01" * (num_blocks * block_bytes)
            incarnation, address = _incarnation_of(theirs), theirs.address()
        else:
            spawn = multiprocessing.get_context("spawn")
            pipe, far_end = spawn.Pipe()
            process = spawn.Process(target=_owner, args=(far_end, name, num_blocks, block_bytes), daemon=True)
            process.start()
            far_end.close()
            if not pipe.poll(_START_SECONDS):
                raise Unavailable(f"a process with {name} pages did not start within {_START_SECONDS:.0f} s")
            incarnation, address = pipe.recv()
        peer = Peer(WorkerId("owner"), Incarnation(incarnation), "nowhere:0")
        ours.connect(peer, address)
        ours.read_epochs(peer, [0], _START_SECONDS)
        yield ours, peer
    finally:
        ours.close()
        if process is not None:
            process.kill()
            process.join(_START_SECONDS)


def read_pages(transport: Transport, peer: Peer, remote: Sequence[int], clock: Clock) -> None:
    """Read the peer's pages `remote` into the local pages 0, 1, 2, ... and wait.

    Args:
        transport: transport that is connected to the peer.
        peer: owner of the pages.
        remote: ids of the peer's pages.
        clock: for the time limit.

    Raises:
        Unavailable: the read did not complete in time.
    """
    deadline = clock.monotonic() + _READ_SECONDS
    read = transport.read(peer, remote, [BlockId(i) for i in range(len(remote))])
    while not read.poll():
        read.wait(0.001)
        if clock.monotonic() > deadline:
            raise Unavailable(f"a read over {transport.name} did not end within {_READ_SECONDS:.0f} s")


def measure(name: str, num_blocks: int, block_bytes: int, *, scattered: bool, rounds: int, clock: Clock) -> TransferRun:
    """Measure a transport with a given number of pages, alternating with its bound.

    Args:
        name: name of the transport, one of `names()`.
        num_blocks: number of pages per read.
        block_bytes: bytes per page.
        scattered: whether to read every second page; otherwise consecutive pages.
        rounds: number of measured rounds.
        clock: clock of the measurement.
    """
    held = 2 * num_blocks if scattered else num_blocks
    remote = list(range(0, held, 2 if scattered else 1))
    size = num_blocks * block_bytes
    with (
        _bound(name, remote, held, block_bytes, clock) as bound,
        pages_of_another_process(name, held, block_bytes) as (transport, peer),
    ):
        actions: dict[str, Callable[[], None]] = {
            "bound": bound,
            name: lambda: read_pages(transport, peer, remote, clock),
        }
        found = alternate(actions, rounds=rounds, clock=clock)
    own, least = found[name], found["bound"]
    return TransferRun(
        transport=name,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        is_scattered=scattered,
        ms=1e3 * own.median,
        ms_least=1e3 * own.least,
        ms_most=1e3 * own.most,
        gbps=size / own.median / 1e9,
        bound_gbps=size / least.median / 1e9,
        share_of_bound=least.median / own.median,
        bound=_BOUNDS.get(name, _COPY),
    )


def summary(runs: Sequence[TransferRun]) -> list[dict[str, object]]:
    """Return a summary per transport: the results of its largest contiguous read."""
    best: dict[str, TransferRun] = {}
    for run in runs:
        if not run.is_scattered and (run.transport not in best or run.num_blocks >= best[run.transport].num_blocks):
            best[run.transport] = run
    return [
        {
            "transport": r.transport,
            "gbps": round(r.gbps, 3),
            "bound_gbps": round(r.bound_gbps, 3),
            "share_of_bound": round(r.share_of_bound, 3),
        }
        for r in best.values()
    ]


_COPY = "a copy in memory"
_BOUNDS = {"nixl": "bare NIXL", "tcp": "a TCP stream", _ENCRYPTED: "plain tcp"}
"""Name of the transfer with which each transport is compared, if that is not a copy in memory."""


def _bound(
    name: str, remote: Sequence[int], held: int, block_bytes: int, clock: Clock
) -> AbstractContextManager[Callable[[], None]]:
    num_blocks = len(remote)
    if name == "nixl":
        return bounds.bare_nixl(num_blocks, block_bytes)
    if name == "tcp":
        return bounds.loopback(num_blocks * block_bytes)
    if name == _ENCRYPTED:
        return _plain_reads(remote, held, block_bytes, clock)
    return bounds.memory_copy(num_blocks * block_bytes)


@contextmanager
def _plain_reads(remote: Sequence[int], held: int, block_bytes: int, clock: Clock) -> Iterator[Callable[[], None]]:
    with pages_of_another_process("tcp", held, block_bytes) as (transport, peer):
        yield lambda: read_pages(transport, peer, remote, clock)


def _owner(pipe: Connection, name: str, num_blocks: int, block_bytes: int) -> None:
    incarnation = new_incarnation()
    transport = _open(name, incarnation)
    memory = transport.allocate(num_blocks, block_bytes)
    memory.pages[:] = b"\x01" * len(memory.pages)
    transport.attend(True)
    pipe.send((incarnation, transport.address()))
    pipe.poll(None)  # blocks until the reader closes the pipe


def _incarnation_of(transport: Transport) -> str:
    import msgspec

    return msgspec.msgpack.decode(transport.address(), type=str)
