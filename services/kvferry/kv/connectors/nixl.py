"""Connector `nixl`: transport through NIXL and UCX: RDMA on an RDMA fabric, otherwise TCP or shared memory.

The design follows from the observed behavior of NIXL 1.5:

- Releasing a transfer handle, removing an agent and deregistering memory are *not* fences: a frozen peer that resumed
  later still wrote into a released buffer. A read is therefore polled until its state is terminal, even after the
  request was cancelled, and its pages stay quarantined until then.
- A removed agent leaves open files behind, so the agents of forgotten peers are kept for a while (`nixl_peers`).
- NIXL never reports a stalled peer; the fetcher enforces deadlines.
- An agent's name cannot be reused after a restart, so agents are named by incarnation.
- Serialized descriptor lists can run code when they are read, so peers exchange plain numbers and build their own
  lists.
- Descriptors are built once per peer; a transfer is two index arrays.
- NIXL's progress thread polls without pause and takes a whole core, even when idle. The thread in this module polls
  often while this worker reads or peers may be reading from it, and rarely otherwise.
"""

import logging
import mmap
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import nixl_cu13._api as nixl_api
import nixl_cu13._bindings as nixl_bindings
import numpy as np
import numpy.typing as npt

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockId, Incarnation
from kvferry.core.process.config import environment
from kvferry.core.process.exit_threads import start_thread
from kvferry.core.process.struct_types import describe
from kvferry.kv.connectors.address_proof import checked, proved
from kvferry.kv.connectors.checks import allocated, check_address, check_page_ids
from kvferry.kv.connectors.nixl_peers import Peers, Remote, check_open_files
from kvferry.kv.connectors.page_files import OwnMemory
from kvferry.kv.interface.connector import PageMemory, Peer, Read, ReadError, TransportSetup
from kvferry.kv.interface.packed import unpacked

# On import, NIXL starts to log to standard output, where kvferry prints results; redirect its log to Python's logging.
_log = logging.getLogger("nixl")
_log.handlers.clear()
_log.propagate = True
_log.setLevel(logging.WARNING)

_EPOCH_BYTES = 8
_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.0001
_BUSY_PROGRESS_SECONDS = 0.0005
_IDLE_PROGRESS_SECONDS = 0.02


_MAX_BLOCKS = 1 << 21
"""Maximum number of pages of a peer. A descriptor takes 24 bytes here and more in NIXL, even if the peer has less
memory than it claims."""
_Place = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of a worker's registered pages."""

    incarnation: str
    metadata: bytes
    """Opaque metadata of the NIXL agent: its name and endpoints."""
    pages: _Place
    epochs: _Place
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=_MAX_BLOCKS)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


describe(_Address)


class _Staging:
    """Registered staging memory for pages of other sizes."""

    def __init__(self, memory: memoryview, registration: Any) -> None:
        self.memory = memory
        self.registration = registration
        self.lists: dict[int, Any] = {}
        """Descriptor lists by page size; each list divides the memory into pages of that size."""


class _NixlRead:
    """One posted read; it is quiet only after NIXL has reported a terminal state."""

    def __init__(self, transport: "NixlTransport", peer: Peer, handle: Any) -> None:
        self._transport = transport
        self._peer = peer
        self._handle = handle
        self._quiet = False
        self._pause = threading.Event()
        self._failure: Exception | None = None

    def poll(self) -> bool:
        self._advance()
        if self._failure is not None:
            raise ReadError(f"NIXL reported a failed read ({self._failure})") from self._failure
        return self._quiet

    def is_quiet(self) -> bool:
        self._advance()
        return self._quiet

    def wait(self, seconds: float) -> None:
        # NIXL offers no blocking wait; each state check drives progress.
        self._pause.wait(min(seconds, _LOOK_SECONDS))

    def _advance(self) -> None:
        if self._quiet:
            return
        try:
            state = self._transport.check(self._handle)
        except Exception as error:  # NIXL raises one exception class per status code, all for terminal states
            state, self._failure = "ERR", error
        if state == "PROC":
            return
        if state == "ERR" and self._failure is None:
            self._failure = RuntimeError("the transfer ended in an error")
        self._quiet = True
        self._transport.retire(self._peer, self._handle, failed=self._failure is not None)


class NixlTransport:
    """Transport over one NIXL agent; pages are in registered host memory."""

    name = "nixl"
    domain = ""

    def __init__(self, incarnation: Incarnation, clock: Clock, setup: TransportSetup) -> None:
        self._incarnation = incarnation
        self._setup = setup
        self._secrets = setup.secrets
        self._clock = clock
        # Serializes all calls to the agent, which is not thread-safe.
        self._lock = threading.Lock()
        settings = nixl_api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_api.nixl_agent(incarnation, settings)
        if "UCX" not in self._agent.backends:
            raise UsageError("connector 'nixl': NIXL has no UCX backend on this machine", field="connector")
        self._peers = Peers(self._remove)
        self._memory: OwnMemory | None = None
        self._own: _Address | None = None
        self._landing_lock = threading.Lock()  # for epoch reads, which share one receive buffer; taken before _lock
        self._readers_expected = False
        self._wake = threading.Event()
        self._closed = False
        self._helper: threading.Thread | None = None
        self._staging: dict[int, _Staging] = {}
        """Staging memory areas, by the address of their first byte."""
        self._abandoned: list[object] = []
        """Reads with receive buffers to which a stalled peer may still write; both stay allocated."""

    def attend(self, busy: bool) -> None:
        self._readers_expected = busy
        self._wake.set()

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        # One anonymous mapping: pages | their epochs | receive buffer for peers' epochs, with one entry per page of
        # this worker.
        split = num_blocks * block_bytes
        self._memory = OwnMemory(split + 2 * num_blocks * _EPOCH_BYTES, self._setup)
        whole = self._memory.memory
        base = _address(whole)
        self._landing = whole[split + num_blocks * _EPOCH_BYTES :].cast("Q")
        with self._lock:
            self._registration = self._agent.register_memory([(base, len(whole), 0, "kvferry")], "DRAM")
            self._own_pages = self._prepare("", base, num_blocks, block_bytes)
            self._own_landing = self._prepare("", base + split + num_blocks * _EPOCH_BYTES, num_blocks, _EPOCH_BYTES)
            metadata = self._agent.get_agent_metadata()
        self._own = _Address(self._incarnation, metadata, base, base + split, num_blocks, block_bytes)
        self._helper = start_thread(self._progress, "nixl-progress", self._stop_progress)
        epochs = whole[split : split + num_blocks * _EPOCH_BYTES].cast("Q")
        return PageMemory(whole[:split], epochs, self._memory.place)

    def address(self) -> bytes:
        return proved(self._secrets, msgspec.msgpack.encode(self._own))

    def connect(self, peer: Peer, address: bytes) -> None:
        try:
            where = unpacked(checked(self._secrets, address), _Address)
        except msgspec.DecodeError as error:
            raise ReadError("the peer's address is malformed") from error
        check_address(peer, where.incarnation)
        allocated(self._own)
        with self._lock:
            if self._peers.resume(peer, where):
                return
            check_open_files(peer.worker_id)
            try:
                name = self._agent.add_remote_agent(where.metadata)
                name = name.decode() if isinstance(name, bytes) else name
                if name != peer.incarnation:
                    raise ReadError(f"worker {peer.worker_id}: metadata of agent {name}, not {peer.incarnation}")
                pages = self._prepare(name, where.pages, where.num_blocks, where.block_bytes)
                epochs = self._prepare(name, where.epochs, where.num_blocks, _EPOCH_BYTES)
            except _NIXL_ERRORS as error:
                raise ReadError(f"NIXL cannot reach worker {peer.worker_id} ({error})") from error
            self._peers.add(peer, Remote(name, pages, epochs, where, where.num_blocks, where.block_bytes))

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        own = allocated(self._own)
        if len(remote) != len(local):
            raise ReadError(f"cannot read {len(remote)} pages into {len(local)}")
        check_page_ids(local, own.num_blocks, "this worker")
        with self._lock:
            theirs = self._peers.find(peer)
        if theirs.block_bytes != own.block_bytes:
            raise ReadError(f"the peer's pages have {theirs.block_bytes} bytes, this worker's {own.block_bytes}")
        return self._post(peer, "pages", remote, self._own_pages, local)

    def staging(self, num_bytes: int) -> memoryview:
        memory = memoryview(mmap.mmap(-1, num_bytes))
        base = _address(memory)
        with self._lock:
            registration = self._agent.register_memory([(base, num_bytes, 0, "kvferry-staging")], "DRAM")
            self._staging[base] = _Staging(memory, registration)
        return memory

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        with self._lock:
            size = self._peers.find(peer).block_bytes
            base = _address(into) if into else 0
            place = self._staging.get(base)
            if place is None:
                raise ReadError("cannot read pages into memory that `staging` did not allocate")
            if not len(remote) * size == len(into) <= len(place.memory):
                raise ReadError(f"{len(remote)} pages of {size} B do not fill {len(into)} of {len(place.memory)} B")
            if size not in place.lists:
                place.lists[size] = self._prepare("", base, len(place.memory) // size, size)
        return self._post(peer, "pages", remote, place.lists[size], range(len(remote)))

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        own = allocated(self._own)
        deadline = self._clock.monotonic() + timeout
        if not self._landing_lock.acquire(timeout=timeout):
            raise ReadError(f"earlier epoch reads took longer than {timeout:.2f} s")
        try:
            found: list[int] = []
            count = own.num_blocks  # a prompt has more pages than this if the peer's blocks are smaller
            for i in range(0, max(1, len(remote)), count):
                found += self._read_epochs(peer, remote[i : i + count], deadline, timeout)
            return found
        finally:
            self._landing_lock.release()

    def forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.forget(peer)

    def close(self) -> None:
        self._stop_progress()
        if self._helper is not None:
            self._helper.join()  # the thread must not call NIXL during teardown; one iteration of it is short
        with self._lock:
            if self._own is None or self._peers.is_reading:
                return  # a read may still write, so the memory must stay mapped until the process exits
            self._peers.close()
            self._own_pages.release()
            self._own_landing.release()
            for place in self._staging.values():
                for prepared in place.lists.values():
                    prepared.release()
                self._agent.deregister_memory(place.registration)
            self._staging.clear()
            self._agent.deregister_memory(self._registration)
            self._own = None

    def check(self, handle: Any) -> str:
        """Return NIXL's state of a posted read: DONE, PROC or ERR; raise NIXL's error for other terminal states."""
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def retire(self, peer: Peer, handle: Any, *, failed: bool) -> None:
        """Release the handle of a read in a terminal state."""
        with self._lock:
            handle.release()
            self._peers.retire(peer, failed=failed)

    def _stop_progress(self) -> None:
        self._closed = True
        self._wake.set()

    def _progress(self) -> None:
        """Drive UCX progress for peers that connect or read, since UCX runs without a progress thread."""
        while not self._closed:
            with self._lock:
                if self._own is not None:
                    self._agent.get_new_notifs()
                busy = self._peers.is_reading or self._readers_expected
            self._wake.wait(_BUSY_PROGRESS_SECONDS if busy else _IDLE_PROGRESS_SECONDS)
            self._wake.clear()

    def _post(
        self, peer: Peer, what: str, remote_ids: Sequence[int], local: Any, local_ids: Sequence[int]
    ) -> _NixlRead:
        with self._lock:
            remote = self._peers.find(peer)
            if not remote_ids:
                raise ReadError("a read needs at least one page")
            check_page_ids(remote_ids, remote.num_blocks, f"worker {peer.worker_id}")
            theirs = remote.pages if what == "pages" else remote.epochs
            handle: Any = None
            try:
                handle = self._agent.make_prepped_xfer("READ", local, _ids(local_ids), theirs, _ids(remote_ids))
                self._agent.transfer(handle)  # its status is ignored: the first poll returns it
            except _NIXL_ERRORS as error:
                # Posting failed, for example because the peer is gone: no transfer is in flight.
                if handle is not None:
                    handle.release()
                remote.is_broken = True
                raise ReadError(f"NIXL rejected a read from worker {peer.worker_id} ({error})") from error
            remote.active += 1
        return _NixlRead(self, peer, handle)

    def _read_epochs(self, peer: Peer, remote: Sequence[int], deadline: float, timeout: float) -> list[int]:
        """Read epochs, at most as many as the receive buffer holds; called with `_landing_lock` held."""
        read = self._post(peer, "epochs", remote, self._own_landing, range(len(remote)))
        pause = threading.Event()
        while not read.poll():
            if self._clock.monotonic() >= deadline:
                # The read may still write to the receive buffer, so the buffer must not be reused.
                self._abandon_landing(read)
                raise ReadError(f"the peer's epochs did not arrive within {timeout:.2f} s")
            pause.wait(_POLL_SECONDS)
        return list(self._landing[: len(remote)])

    def _abandon_landing(self, read: _NixlRead) -> None:
        """Replace the receive buffer of epoch reads; the old buffer stays registered until the process exits."""
        if self._own is None:
            return
        self._abandoned.append((self._landing, self._own_landing, read))
        spare = mmap.mmap(-1, self._own.num_blocks * _EPOCH_BYTES)
        base = np.frombuffer(spare, dtype=np.uint8).ctypes.data
        with self._lock:
            self._agent.register_memory([(base, len(spare), 0, "kvferry-epochs")], "DRAM")
            self._own_landing = self._prepare("", base, self._own.num_blocks, _EPOCH_BYTES)
        self._landing = memoryview(spare).cast("Q")

    def _prepare(self, agent: str, base: int, count: int, size: int) -> Any:
        rows = np.zeros((count, 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(size)
        rows[:, 1] = size
        return self._agent.prep_xfer_dlist(agent, self._agent.get_xfer_descs(rows, "DRAM"), "DRAM")

    def _remove(self, remote: Remote) -> None:
        remote.pages.release()
        remote.epochs.release()
        try:
            self._agent.remove_remote_agent(remote.agent_name)
        except _NIXL_ERRORS as error:
            _log.info("removing agent %s: %s", remote.agent_name, error)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _ids(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(ids, dtype=np.int32)


_NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(nixl_bindings, name) for name in dir(nixl_bindings) if name.startswith("nixl") and name.endswith("Error")
)


def open_transport(incarnation: Incarnation, setup: TransportSetup) -> NixlTransport:
    """Create the transport of one incarnation.

    Raises:
        UsageError: NIXL has no UCX backend on this machine, or UCX finds no device that it may use.
    """
    try:
        return NixlTransport(incarnation, SystemClock(), setup)
    except _NIXL_ERRORS as error:
        given = [f"{name}={environment().get(name, '(unset)')}" for name in ("UCX_NET_DEVICES", "UCX_TLS")]
        raise UsageError(
            f"connector 'nixl': UCX cannot use a network device ({error}) with {', '.join(given)}; unset the two, or "
            "set them to devices and transports of this machine (`ip link`, `ibv_devices`)",
            field="connector",
        ) from error
