"""Agents of peers of the connector `nixl`: connected, parked after `forget`, or removed.

NIXL 1.5 with UCX keeps one or two file descriptors of each removed agent, here and in the peer's process, until one of
the two processes ends. So an agent is not removed when its peer is forgotten, unless a read of it failed or stalled: it
is parked, and used again when the same incarnation reconnects.
"""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.core.ids import Incarnation
from kvferry.kv.interface.connector import Peer, ReadError

_MAX_PARKED = 8
_MAX_OPEN_SHARE = 0.8
"""Share of the limit of open files above which no agent is added; the rest is for connections of clients and peers."""


@dataclass(slots=True, eq=False)
class Remote:
    """Agent and descriptor lists of one peer."""

    agent_name: str
    pages: Any
    epochs: Any
    where: Any
    """Address from which the agent and the lists were made."""
    num_blocks: int
    block_bytes: int
    active: int = 0
    """Number of reads that are not quiet yet; the agent is removed only when it is zero."""
    is_forgotten: bool = False
    is_broken: bool = False
    """Whether a read failed or stalled, so that the agent must not be used again."""


class Peers:
    """Agents by incarnation. Not thread-safe."""

    def __init__(self, remove: Callable[[Remote], None]) -> None:
        """
        Args:
            remove: releases the lists of a peer and removes its agent.
        """
        self._remove = remove
        self._remotes: dict[Incarnation, Remote] = {}
        self._parked: dict[Incarnation, str] = {}
        """Worker ids of the parked agents, the agent parked longest first."""

    @property
    def is_reading(self) -> bool:
        """Whether a read of any peer is not quiet yet."""
        return any(remote.active for remote in self._remotes.values())

    def find(self, peer: Peer) -> Remote:
        """Return the agent of a connected peer.

        Raises:
            ReadError: the peer is not connected.
        """
        remote = self._remotes.get(peer.incarnation)
        if remote is None or remote.is_forgotten:
            raise ReadError(f"worker {peer.worker_id} is not connected")
        return remote

    def resume(self, peer: Peer, where: object) -> bool:
        """Use the agent of a peer again; return whether it has one. Agents of former incarnations are removed.

        Args:
            peer: the peer.
            where: its address; an agent that was made from a different one is removed.
        """
        for former in [key for key, worker in self._parked.items() if worker == peer.worker_id]:
            if former != peer.incarnation:
                self._drop(former)
        remote = self._remotes.get(peer.incarnation)
        if remote is None:
            return False
        if peer.incarnation in self._parked:
            if remote.where != where:
                self._drop(peer.incarnation)
                return False
            del self._parked[peer.incarnation]
            remote.is_forgotten = False
        return True

    def add(self, peer: Peer, remote: Remote) -> None:
        """Add the agent of a peer that has none."""
        self._remotes[peer.incarnation] = remote

    def forget(self, peer: Peer) -> None:
        """Park or remove the agent of a peer once its reads are quiet; no effect if there is none."""
        remote = self._remotes.get(peer.incarnation)
        if remote is None or remote.is_forgotten:
            return
        remote.is_forgotten = True
        remote.is_broken |= remote.active > 0
        self._settle(peer, remote)

    def retire(self, peer: Peer, *, failed: bool) -> None:
        """Record that a read is quiet.

        Args:
            peer: the peer of the read.
            failed: whether NIXL reported an error.
        """
        remote = self._remotes.get(peer.incarnation)
        if remote is not None:
            remote.active -= 1
            remote.is_broken |= failed
            self._settle(peer, remote)

    def close(self) -> None:
        """Remove all agents; none may have a read."""
        for incarnation in list(self._remotes):
            self._drop(incarnation)

    def _settle(self, peer: Peer, remote: Remote) -> None:
        if not remote.is_forgotten or remote.active:
            return
        if remote.is_broken:
            self._drop(peer.incarnation)
            return
        self._parked[peer.incarnation] = peer.worker_id
        if len(self._parked) > _MAX_PARKED:
            self._drop(next(iter(self._parked)))

    def _drop(self, incarnation: Incarnation) -> None:
        self._parked.pop(incarnation, None)
        self._remove(self._remotes.pop(incarnation))


def check_open_files(worker_id: str) -> None:
    """Check that this process may open the files of one more agent.

    Args:
        worker_id: the peer, for the error.

    Raises:
        ReadError: more than 80 % of the limit of open files is in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and count > _MAX_OPEN_SHARE * limit:
        raise ReadError(
            f"cannot connect to worker {worker_id}: {count} of {limit} files are open, and NIXL keeps those of removed "
            "agents until their workers end; raise the limit (ulimit -n, LimitNOFILE), or restart this worker"
        )
