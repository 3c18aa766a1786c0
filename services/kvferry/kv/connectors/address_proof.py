"""Proof that an address was made by a worker of the pool, for libraries that must not parse untrusted bytes: NIXL ends
the process on some malformed metadata."""

import hmac
from collections.abc import Sequence

from blake3 import blake3

from kvferry.kv.interface.connector import ReadError

_CONTEXT = "kvferry 2026-11-25 address of a connector"
_PROOF_BYTES = 16


def proved(secrets: Sequence[bytes], address: bytes) -> bytes:
    """Prefix an address with its proof.

    Args:
        secrets: secrets of the pool, newest first. Without any, the proof only detects changed bytes.
        address: the address.
    """
    return _proof(secrets[0] if secrets else b"", address) + address


def checked(secrets: Sequence[bytes], proved_address: bytes) -> bytes:
    """Return an address without its proof, which may have been made with any of the secrets.

    Args:
        secrets: the pool's secrets; without any, proofs are made with an empty secret.
        proved_address: proof and address, as `proved` returns them.

    Raises:
        ReadError: the proof is missing, or was made with none of the secrets.
    """
    proof, address = proved_address[:_PROOF_BYTES], proved_address[_PROOF_BYTES:]
    if not any(hmac.compare_digest(_proof(secret, address), proof) for secret in secrets or (b"",)):
        raise ReadError("the peer's address was not made by a worker of this pool, or is damaged")
    return address


def _proof(secret: bytes, address: bytes) -> bytes:
    key = blake3(secret, derive_key_context=_CONTEXT).digest()
    return blake3(address, key=key).digest(length=_PROOF_BYTES)
