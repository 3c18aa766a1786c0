"""What the machine itself can do, by the plainest means: a copy in memory, bytes over loopback, NIXL in a bare loop."""

import logging
import mmap
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.core.errors import Unavailable

_START_SECONDS = 30.0
_PIECE_BYTES = 1 << 20


@contextmanager
def memory_copy(num_bytes: int) -> Iterator[Callable[[], None]]:
    """One thread's copy of so many bytes between two touched places."""
    source = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    target = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    source[:] = 1
    target[:] = 2
    yield lambda: np.copyto(target, source)


@contextmanager
def loopback(num_bytes: int) -> Iterator[Callable[[], None]]:
    """So many bytes from another process over one TCP connection, sent and received in large pieces, into memory that
    was touched: what iperf does. A C program of the same loop was as fast within the spread of its own runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener, _process(_loopback_sender, num_bytes) as pipe:
        pipe.send(listener.getsockname()[1])
        listener.settimeout(_START_SECONDS)
        link, _ = listener.accept()
        target = memoryview(mmap.mmap(-1, num_bytes))
        target[:] = bytes(num_bytes)

        def receive() -> None:
            link.sendall(b"g")
            done = 0
            while done < num_bytes:
                done += link.recv_into(target[done : done + _PIECE_BYTES])

        with link:
            yield receive


def _loopback_sender(pipe: Connection, num_bytes: int) -> None:
    source = memoryview(mmap.mmap(-1, num_bytes))
    source[:] = b"\x01" * num_bytes
    with socket.create_connection(("127.0.0.1", pipe.recv())) as link:
        while link.recv(1):
            link.sendall(source)


@contextmanager
def bare_nixl(num_blocks: int, block_bytes: int) -> Iterator[Callable[[], None]]:
    """Reads of so many pages from another process by NIXL alone: prepared lists, post, poll without pause, as its own
    benchmark does."""
    with _process(_nixl_owner, num_blocks, block_bytes) as pipe:
        agent, memory = _nixl_agent("kvferry-bare-reader", num_blocks * block_bytes)
        name = agent.add_remote_agent(pipe.recv())
        base = pipe.recv()
        pipe.send(agent.get_agent_metadata())
        theirs = _nixl_list(agent, name, base, num_blocks, block_bytes)
        ours = _nixl_list(agent, "", _address_of(memory), num_blocks, block_bytes)
        ids = np.arange(num_blocks, dtype=np.int32)

        def read() -> None:
            handle = agent.make_prepped_xfer("READ", ours, ids, theirs, ids)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            handle.release()
            if state != "DONE":
                raise Unavailable(f"NIXL ended a read with {state}")

        yield read


def _nixl_owner(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    agent, memory = _nixl_agent("kvferry-bare-owner", num_blocks * block_bytes)
    pipe.send(agent.get_agent_metadata())
    pipe.send(_address_of(memory))
    agent.add_remote_agent(pipe.recv())
    pipe.poll(None)  # until the reader leaves


def _nixl_agent(name: str, num_bytes: int) -> tuple[Any, mmap.mmap]:
    import nixl_cu13._api as nixl_api  # only who has NIXL measures it

    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_api.nixl_agent(name, nixl_api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    memory = mmap.mmap(-1, num_bytes)
    memory[:] = b"\x01" * num_bytes
    agent.register_memory([(_address_of(memory), num_bytes, 0, "")], "DRAM")
    return agent, memory


def _nixl_list(agent: Any, peer: str, base: int, count: int, size: int) -> Any:
    rows = np.zeros((count, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(size)
    rows[:, 1] = size
    return agent.prep_xfer_dlist(peer, agent.get_xfer_descs(rows, "DRAM"), "DRAM")


def _address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process of its own with a pipe to it; killed at the end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join(_START_SECONDS)
