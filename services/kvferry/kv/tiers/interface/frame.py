"""Frame format of storage objects outside the process: an authenticated header, then the raw or encrypted pages.

    offset   0  magic "kvftier", version 1 B         readers of another version reject the frame
             8  flags u32 LE (1: sealed), 4 zero B
            16  length of the pages, u64 LE
            24  name of the object, 32 B
            56  XXH3-128 of the pages, or the AES-GCM tag, 16 B
            72  AES-GCM nonce, or zeros, 12 B; 28 zero B
           112  MAC of the above, 16 B
           128  the pages, or their ciphertext of the same length

For each tenant, BLAKE3 derives keys for MAC, digest and encryption from the pool's tier secret, so only a holder of the
secret can create a header for a tenant and a name. The digest's seed is derived from a key and the name: it detects
accidental corruption and objects under a wrong name, but XXH3 is not a cryptographic hash. If an attacker can *write*
to the store, enable encryption: the tag then authenticates every byte, with a separate key for each object. The format
is fixed by tests/golden/tier_frames.json. Pure, without I/O.
"""

import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from hmac import compare_digest
from importlib import import_module
from typing import Any

import xxhash
from blake3 import blake3

from kvferry.core.errors import UsageError
from kvferry.kv.tiers.interface.tier import ObjectKey, TierError

_MAGIC = b"kvftier\x01"
_CONTEXT = "kvferry 2026-11 tier object"
_FIELDS = struct.Struct("<8sI4xQ32s16s12s28x")
_SEALED = 1
_MAC_BYTES = 16
_NONCE_BYTES = 12
_KEY_BYTES = 32

HEADER_BYTES = _FIELDS.size + _MAC_BYTES
CHUNK_BYTES = 256 << 10
"""Bytes per read; small enough that a chunk is still in the core's cache when it is verified."""
MIN_SECRET_BYTES = 16


class FrameDamaged(TierError):
    """The stored value is damaged or belongs to a different name; it is unusable and may be removed."""


def flat(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Convert parts to byte views and drop empty parts.

    Args:
        parts: contiguous buffers of any format.
        num_bytes: expected total length.

    Raises:
        ValueError: the total length of the parts is not `num_bytes`.
    """
    if len(parts) == 1 and parts[0].nbytes == num_bytes and parts[0].format == "B" and parts[0].ndim == 1:
        return [parts[0]]
    views = [p if p.format == "B" and p.ndim == 1 else p.cast("B") for p in parts]
    total = sum(len(v) for v in views)
    if total != num_bytes:
        raise ValueError(f"the parts have {total} bytes in total; an object has {num_bytes}")
    return [v for v in views if len(v)]


def chunked(parts: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Split the parts into runs of at most `size` bytes, in order.

    Args:
        parts: byte views.
        size: maximum number of bytes of a run.
    """
    run: list[memoryview] = []
    room = size
    for part in parts:
        at = 0
        while at < len(part):
            piece = part[at : at + room]
            run.append(piece)
            at += len(piece)
            room -= len(piece)
            if not room:
                yield run
                run, room = [], size
    if run:
        yield run


class Opening:
    """Incremental verifier of one object, which also decrypts an encrypted object as its bytes arrive. Created by
    `Frames.open`."""

    def __init__(self, expected: bytes, digest: Any, decryptor: Any) -> None:
        """
        Args:
            expected: digest in the header; not used for an encrypted object.
            digest: incremental digest of the stored bytes.
            decryptor: AES-GCM decryptor of an encrypted object; `None` for a plain one.
        """
        self._expected = expected
        self._digest = digest
        self._decryptor = decryptor
        self._scratch = memoryview(bytearray(CHUNK_BYTES)) if decryptor is not None else memoryview(b"")

    def feed(self, arrived: memoryview) -> None:
        """Process the next bytes, in order; encrypted bytes are decrypted in place."""
        if self._decryptor is None:
            self._digest.update(arrived)
            return
        for at in range(0, len(arrived), CHUNK_BYTES):
            piece = arrived[at : at + CHUNK_BYTES]
            # Decrypt through a scratch buffer, since the cipher does not support overlapping input and output.
            self._decryptor.update_into(piece, self._scratch[: len(piece)])
            piece[:] = self._scratch[: len(piece)]

    def finish(self) -> None:
        """Verify the object after all bytes have been passed to `feed`.

        Raises:
            FrameDamaged: the bytes differ from the stored object.
        """
        if self._decryptor is None:
            if not compare_digest(self._digest.digest(), self._expected):
                raise FrameDamaged("the stored pages were altered: their digest differs")
            return
        try:
            self._decryptor.finalize()
        except Exception as error:  # InvalidTag from an optional package that is not imported here
            raise FrameDamaged("the stored pages were altered, or sealed with a different key") from error


class Frames:
    """Codec for frames of objects of equal length, under one secret. Immutable and thread-safe."""

    def __init__(
        self,
        secret: bytes,
        object_bytes: int,
        *,
        encrypt: bool = False,
        nonce: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """
        Args:
            secret: the pool's tier secret, at least 16 bytes; never logged.
            object_bytes: length of every object.
            encrypt: whether to encrypt the pages and accept only encrypted frames.
            nonce: returns the given number of random bytes.

        Raises:
            ValueError: `secret` is too short, or `object_bytes` is not positive.
            UsageError: encryption needs a package that is not installed.
        """
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a tier secret needs at least {MIN_SECRET_BYTES} bytes")
        if object_bytes < 1:
            raise ValueError(f"object_bytes must be positive, not {object_bytes}")
        if encrypt:
            _ciphers()
        self.object_bytes = object_bytes
        self._encrypt = encrypt
        self._nonce = nonce
        self._root = blake3(secret, derive_key_context=_CONTEXT).digest()

    @property
    def frame_bytes(self) -> int:
        """Length of a frame in bytes, header and pages."""
        return HEADER_BYTES + self.object_bytes

    def frame(self, key: ObjectKey, parts: Sequence[memoryview]) -> tuple[bytes, list[memoryview]]:
        """Encode a frame; return its header and its pages, which are `parts` themselves or one encrypted copy.

        Args:
            key: key of the object.
            parts: content of the object, in order.

        Raises:
            ValueError: the total length of `parts` is not `object_bytes`.
        """
        views = flat(parts, self.object_bytes)
        mac_key, digest_key, seal_key = self._keys(key.tenant)
        if not self._encrypt:
            digest = _digest(digest_key, key.name)
            for run in chunked(views, CHUNK_BYTES):
                for piece in run:
                    digest.update(piece)
            return _header(mac_key, 0, self.object_bytes, key.name, digest.digest(), b""), views
        nonce = self._nonce(_NONCE_BYTES)
        encryptor = _gcm(seal_key, key.name, nonce, self.object_bytes, None)
        sealed = memoryview(bytearray(self.object_bytes))
        at = 0
        for view in views:
            at += encryptor.update_into(view, sealed[at : at + len(view)])
        encryptor.finalize()
        return _header(mac_key, _SEALED, self.object_bytes, key.name, encryptor.tag, nonce), [sealed]

    def open(self, header: bytes, key: ObjectKey) -> Opening:
        """Verify `header`; return the verifier of the pages that follow. If this raises, the pages need not be read.

        Args:
            header: the stored header, of `HEADER_BYTES` bytes.
            key: key of the object.

        Raises:
            FrameDamaged: the header is not of this version, was not made with the secret for this tenant, name and
                length, or is not encrypted although encryption is required.
            TierError: the frame is encrypted, and the package for encryption is not installed.
        """
        if len(header) != HEADER_BYTES or header[: len(_MAGIC)] != _MAGIC:
            raise FrameDamaged("the stored value is not a frame of this version")
        mac_key, digest_key, seal_key = self._keys(key.tenant)
        if not compare_digest(header[_FIELDS.size :], _mac(mac_key, header[: _FIELDS.size])):
            raise FrameDamaged("the stored header was altered, or made with a different secret")
        _, flags, length, name, digest, nonce = _FIELDS.unpack_from(header)
        if name != key.name:
            raise FrameDamaged("the stored value belongs to a different object")
        if length != self.object_bytes:
            raise FrameDamaged(f"the stored object has {length} bytes, not {self.object_bytes}")
        if self._encrypt and flags != _SEALED:
            raise FrameDamaged("the stored object is not encrypted, and this tier accepts only encrypted objects")
        if flags == 0:
            return Opening(digest, _digest(digest_key, key.name), None)
        if flags != _SEALED:
            raise FrameDamaged(f"the stored object has the flags {flags}, which this version does not support")
        try:
            return Opening(b"", None, _gcm(seal_key, key.name, nonce, length, digest))
        except UsageError as error:
            raise TierError(error.message) from error

    def _keys(self, tenant: str) -> tuple[bytes, bytes, bytes]:
        """Derive a tenant's keys for MAC, digest and encryption. To bound memory, they are not cached; the derivation
        takes 2 us."""
        made = blake3(tenant.encode(), key=self._root).digest(length=3 * _KEY_BYTES)
        return made[:_KEY_BYTES], made[_KEY_BYTES : 2 * _KEY_BYTES], made[2 * _KEY_BYTES :]


def _header(mac_key: bytes, flags: int, length: int, name: bytes, digest: bytes, nonce: bytes) -> bytes:
    fields = _FIELDS.pack(_MAGIC, flags, length, name, digest, nonce)
    return fields + _mac(mac_key, fields)


def _mac(mac_key: bytes, fields: bytes) -> bytes:
    return blake3(fields, key=mac_key).digest(length=_MAC_BYTES)


def _digest(digest_key: bytes, name: bytes) -> Any:
    seed = int.from_bytes(blake3(name, key=digest_key).digest(length=8), "little")
    return xxhash.xxh3_128(seed=seed)


def _gcm(seal_key: bytes, name: bytes, nonce: bytes, length: int, tag: bytes | None) -> Any:
    """Create an encryptor, or, if `tag` is given, a decryptor, with a separate key per object to avoid nonce reuse."""
    ciphers = _ciphers()
    key = blake3(name, key=seal_key).digest()
    cipher = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.GCM(nonce, tag))
    context = cipher.encryptor() if tag is None else cipher.decryptor()
    context.authenticate_additional_data(_FIELDS.pack(_MAGIC, _SEALED, length, name, b"", b""))
    return context


def _ciphers() -> Any:
    try:
        return import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise UsageError(
            "encryption of a tier needs a package that is not installed (cryptography); "
            "install it with: pip install 'kvferry[encryption]'",
            field="tier",
        ) from error
