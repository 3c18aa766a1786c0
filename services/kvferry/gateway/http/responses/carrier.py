"""Carriers of text: the value `encrypted_content` of an item of reasoning or compaction, with which a client sends the
text back.

    base64url( kind | BLAKE3 MAC of tenant, kind and content, 32 bytes | content: deflated UTF-8 )

A carrier is authenticated, so that no client can write reasoning or a summary for the model under another tenant's key.
It is not secret: an item of reasoning has the text as well, and a summary is of the client's own conversation.
"""

import base64
import binascii
import zlib
from dataclasses import dataclass
from enum import Enum
from hmac import compare_digest

from blake3 import blake3

MAX_CARRIER_CHARS = 4 << 20
"""Maximum length of a carrier in characters."""
MAX_CARRIED_CHARS = 8 << 20
"""Maximum length of the text of all carriers of a conversation in characters."""
_MAC_BYTES = 32
_CONTEXT = "kvferry 2026-11 carrier of reasoning, version 1"


class Carried(Enum):
    """What a carrier has; one kind is not taken for another."""

    REASONING = b"\x01"
    SUMMARY = b"\x02"


@dataclass(frozen=True, slots=True)
class CarrierKey:
    """Key of one tenant's carriers."""

    key: bytes

    @classmethod
    def of(cls, secret: bytes, tenant: str) -> "CarrierKey":
        """Derive the key of a tenant from the pool's secret."""
        pool = blake3(secret, derive_key_context=_CONTEXT).digest()
        return cls(blake3(tenant.encode(), key=pool).digest())

    def seal(self, text: str, kind: Carried = Carried.REASONING) -> str:
        """Return the carrier of a text."""
        content = zlib.compress(text.encode("utf-8", "surrogatepass"))
        return base64.urlsafe_b64encode(kind.value + self._mac(kind, content) + content).decode()

    def opened(self, carrier: str, kind: Carried = Carried.REASONING) -> str | None:
        """Return the text in a carrier; `None` if this key did not seal it as this kind."""
        try:
            raw = base64.b64decode(carrier.encode("ascii"), b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            return None
        head, mac, content = raw[:1], raw[1 : 1 + _MAC_BYTES], raw[1 + _MAC_BYTES :]
        if head != kind.value or not compare_digest(mac, self._mac(kind, content)):
            return None
        # Only content that this pool sealed is decompressed, so its size is the one of an answer.
        return zlib.decompress(content).decode("utf-8", "surrogatepass")

    def _mac(self, kind: Carried, content: bytes) -> bytes:
        return blake3(kind.value + content, key=self.key).digest()
