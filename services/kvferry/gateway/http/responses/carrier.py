"""Carrier of reasoning: the value `encrypted_content` of a reasoning item, with which a client that leaves out the text
of the reasoning sends it back.

    base64url( format 1 | BLAKE3 MAC of tenant and content, 32 bytes | content: deflated UTF-8 )

The carrier is authenticated, so that no client can write reasoning for the model under another tenant's key. It is not
secret: the item has the reasoning as text too.
"""

import base64
import binascii
import zlib
from dataclasses import dataclass
from hmac import compare_digest

from blake3 import blake3

MAX_CARRIER_CHARS = 4 << 20
"""Maximum length of a carrier in characters."""
_FORMAT = b"\x01"
_MAC_BYTES = 32
_CONTEXT = "kvferry 2026-11 carrier of reasoning, version 1"


@dataclass(frozen=True, slots=True)
class CarrierKey:
    """Key of one tenant's carriers."""

    key: bytes

    @classmethod
    def of(cls, secret: bytes, tenant: str) -> "CarrierKey":
        """Derive the key of a tenant from the pool's secret."""
        pool = blake3(secret, derive_key_context=_CONTEXT).digest()
        return cls(blake3(tenant.encode(), key=pool).digest())

    def seal(self, reasoning: str) -> str:
        """Return the carrier of a reasoning."""
        content = zlib.compress(reasoning.encode("utf-8", "surrogatepass"))
        return base64.urlsafe_b64encode(_FORMAT + self._mac(content) + content).decode()

    def opened(self, carrier: str) -> str | None:
        """Return the reasoning in a carrier; `None` if this key did not seal it."""
        try:
            raw = base64.b64decode(carrier.encode("ascii"), b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            return None
        head, mac, content = raw[:1], raw[1 : 1 + _MAC_BYTES], raw[1 + _MAC_BYTES :]
        if head != _FORMAT or not compare_digest(mac, self._mac(content)):
            return None
        # Only content that this pool sealed is decompressed, so its size is the one of an answer.
        return zlib.decompress(content).decode("utf-8", "surrogatepass")

    def _mac(self, content: bytes) -> bytes:
        return blake3(_FORMAT + content, key=self.key).digest()
