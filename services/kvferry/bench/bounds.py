"""Measures upper bounds of transfer rates on this machine: memory copy, TCP over loopback, plain NIXL."""

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
    """Yield an action that copies `num_bytes` on one thread between two prefaulted buffers."""
    source = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    target = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    source[:] = 1
    target[:] = 2
    yield lambda: np.copyto(target, source)


@contextmanager
def loopback(num_bytes: int) -> Iterator[Callable[[], None]]:
    """Yield an action that receives `num_bytes` from a second process over one loopback TCP connection, in large chunks
    into prefaulted memory, as iperf does. A C program with the same loop was equally fast, within the variance of the
    measurement."""
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
    """Yield an action that reads `num_blocks` pages from a second process with plain NIXL: prepared lists, post, busy
    poll, as in NIXL's benchmark.

    Args:
        num_blocks: number of pages per read.
        block_bytes: bytes per page.

    Raises:
        Unavailable: NIXL reports a failed read; raised by the action.
    """
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
    pipe.poll(None)  # blocks until the reader closes the pipe


def _nixl_agent(name: str, num_bytes: int) -> tuple[Any, mmap.mmap]:
    import nixl_cu13._api as nixl_api  # optional package

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
    """Yield a child process with a pipe to it; killed at the end."""
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
