"""The fields of messages between workers about their pages that are sealed with the pool's ticket key. Pure.

    seal = [ key id 4 B ][ MAC 32 B ] over the MessagePack array of the fields

Names, ids, epochs and digests of blocks are sealed together, since a process that could pair genuine names with other
pages could plant wrong KV in a reader's prefix cache. Incarnation, ticket id and number keep a seal from being used
again for another process, prompt or position. The encoding is fixed by tests/golden/seals.json."""

import msgspec


class AddressSeal(msgspec.Struct, frozen=True, array_like=True, tag="address"):
    """Content of the seal of `DescribeResponse`."""

    incarnation: str
    connector: str
    fingerprint: bytes
    address: bytes
    """Transport address of the worker's pages, in the connector's own format."""


class BlocksSeal(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """Content of the seal of one `WatchBlocksResponse`."""

    ticket_id: str
    incarnation: str
    number: int
    """Number of the message in its stream, from 0."""
    block_ids: tuple[int, ...]
    epochs: tuple[int, ...]
    names: tuple[bytes, ...]
    digests: tuple[bytes, ...]


Sealed = AddressSeal | BlocksSeal


def sealed_bytes(sealed: Sealed) -> bytes:
    """Encode the fields that a seal covers."""
    return msgspec.msgpack.encode(sealed)
