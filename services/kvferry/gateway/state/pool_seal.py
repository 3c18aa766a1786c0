"""Names of a pool's data in Redis, and encryption of its values, with keys that derive from the pool's key. No I/O."""

from importlib import import_module
from secrets import token_bytes
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from kvferry.core.errors import UsageError

_CONTEXT = "kvferry 2026-11 records of streams, version 1"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_TENANT_DIGITS, _RECORD_DIGITS = 16, 32
T = TypeVar("T")


class PoolSeal:
    """Derives the names of a pool's records, and their seals, from the pool's key."""

    def __init__(self, secret: bytes) -> None:
        """
        Args:
            secret: the pool's key, the same for all gateways; never logged.

        Raises:
            UsageError: the package that encrypts is not installed.
        """
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest()
        self._aead: Any = _aead()
        self.pool = self._mac(b"pool").hex()[:12]
        """Name of the pool in keys."""

    @property
    def prefix(self) -> bytes:
        """Beginning of all keys of the pool; one hash slot of a cluster."""
        return b"{kvferry:%s}:" % self.pool.encode()

    def tenant(self, tenant: str) -> bytes:
        """Return the name of a tenant: a hash of 16 hexadecimal digits."""
        return self._mac(b"tenant\0" + tenant.encode()).hex()[:_TENANT_DIGITS].encode()

    def member(self, tenant: str, stream_id: str) -> bytes:
        """Return the name of a stream's record: a hash of its tenant, and one of tenant and stream, 16 and 32
        hexadecimal digits."""
        return b"%s:%s" % (self.tenant(tenant), self._name(b"stream", tenant, stream_id))

    def response(self, tenant: str, response_id: str) -> bytes:
        """Return the name of a stored response: a hash of tenant and response, 32 hexadecimal digits."""
        return self._name(b"response", tenant, response_id)

    def file(self, file_id: str) -> bytes:
        """Return the name of a file: a hash, 32 hexadecimal digits."""
        return self._name(b"file", "", file_id)

    def batch(self, batch_id: str) -> bytes:
        """Return the name of a batch: a hash, 32 hexadecimal digits."""
        return self._name(b"batch", "", batch_id)

    def seed(self, tenant: str, stream_id: str) -> int:
        """Return the seed of a stream whose request has none: 63 bits."""
        return int.from_bytes(self._mac(b"seed\0" + stream_id.encode() + b"\0" + tenant.encode())[:8]) >> 1

    def seal(self, member: bytes) -> "ValueSeal":
        """Return the seal of a record's values."""
        return ValueSeal(self._aead(self._mac(b"seal\0" + member)))

    def _name(self, kind: bytes, tenant: str, name: str) -> bytes:
        # Names come from clients, and may have lone surrogates.
        digest = self._mac(kind + b"\0" + name.encode("utf-8", "surrogatepass") + b"\0" + tenant.encode())
        return digest.hex()[:_RECORD_DIGITS].encode()

    def _mac(self, data: bytes) -> bytes:
        return blake3(data, key=self._key).digest()


class ValueSeal:
    """Encrypts and opens the values of one record. A value is bound to its record and to the name of its field."""

    def __init__(self, aead: Any) -> None:
        self._aead = aead

    def sealed(self, field: bytes, value: object) -> bytes:
        """Encrypt the value of a field, which msgspec can encode."""
        nonce = token_bytes(_NONCE_BYTES)
        return nonce + bytes(self._aead.encrypt(nonce, msgspec.msgpack.encode(value), field))

    def opened(self, field: bytes, value: bytes, kind: type[T]) -> T | None:
        """Return the value of a field; `None` if this pool did not seal it for this field of this record, or as another
        kind.

        Args:
            field: name of the field.
            value: its sealed value.
            kind: type of the value.
        """
        if len(value) < _NONCE_BYTES + _TAG_BYTES:
            return None
        try:
            plain = self._aead.decrypt(value[:_NONCE_BYTES], value[_NONCE_BYTES:], field)
            return msgspec.msgpack.decode(plain, type=kind)
        except (_invalid_tag(), msgspec.DecodeError):  # ValidationError is a DecodeError
            return None


def _aead() -> Any:
    try:
        return import_module("cryptography.hazmat.primitives.ciphers.aead").ChaCha20Poly1305
    except ImportError as error:
        raise UsageError(
            "--state needs a package that is not installed (cryptography); install it with: pip install "
            "'kvferry[state]'",
            field="state",
        ) from error


def _invalid_tag() -> Any:
    return import_module("cryptography.exceptions").InvalidTag
