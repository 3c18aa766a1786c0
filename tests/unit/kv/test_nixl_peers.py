"""Agents of forgotten peers: which are kept, used again or removed."""

import pytest

from kvferry.core.ids import Incarnation
from kvferry.kv.connectors.nixl_peers import Peers, Remote
from kvferry.kv.interface.connector import Peer, ReadError

HERE = "an address"


def a_peer(number: int, life: str = "") -> Peer:
    return Peer(f"w{number}", Incarnation(f"i{number}{life}"), "127.0.0.1:1")


def connected(peers: Peers, peer: Peer) -> Remote:
    assert not peers.resume(peer, HERE)
    remote = Remote(peer.incarnation, None, None, HERE, 4, 4096)
    peers.add(peer, remote)
    return remote


@pytest.fixture
def removed() -> list[str]:
    return []


@pytest.fixture
def peers(removed: list[str]) -> Peers:
    return Peers(lambda remote: removed.append(remote.agent_name))


def test_a_forgotten_agent_is_refused_until_it_is_used_again(peers: Peers, removed: list[str]) -> None:
    peer = a_peer(0)
    remote = connected(peers, peer)
    peers.forget(peer)
    with pytest.raises(ReadError, match="not connected"):
        peers.find(peer)
    assert peers.resume(peer, HERE)
    assert peers.find(peer) is remote
    assert removed == []


def test_an_agent_from_another_address_is_removed(peers: Peers, removed: list[str]) -> None:
    peer = a_peer(0)
    connected(peers, peer)
    peers.forget(peer)
    assert not peers.resume(peer, "another address")
    assert removed == ["i0"]


@pytest.mark.parametrize("failed", [True, False], ids=["failed", "stalled"])
def test_the_agent_of_a_failed_or_stalled_read_is_removed_once_it_is_quiet(
    peers: Peers, removed: list[str], failed: bool
) -> None:
    peer = a_peer(0)
    connected(peers, peer).active = 1
    peers.forget(peer)
    assert removed == []
    assert peers.is_reading
    peers.retire(peer, failed=failed)
    assert removed == ["i0"]
    assert not peers.resume(peer, HERE)


def test_a_failed_read_of_a_connected_peer_leaves_the_agent_until_it_is_forgotten(
    peers: Peers, removed: list[str]
) -> None:
    peer = a_peer(0)
    connected(peers, peer).active = 1
    peers.retire(peer, failed=True)
    assert removed == []
    peers.forget(peer)
    assert removed == ["i0"]


def test_the_agent_of_a_former_incarnation_is_removed(peers: Peers, removed: list[str]) -> None:
    connected(peers, a_peer(0))
    peers.forget(a_peer(0))
    connected(peers, a_peer(0, "b"))
    assert removed == ["i0"]


def test_only_the_agents_that_were_forgotten_last_are_kept(peers: Peers, removed: list[str]) -> None:
    for number in range(10):
        connected(peers, a_peer(number))
        peers.forget(a_peer(number))
        peers.forget(a_peer(number))
    assert removed == ["i0", "i1"]
    peers.close()
    assert removed == [f"i{number}" for number in range(10)]
