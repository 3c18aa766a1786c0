"""The prefixes that operators have pinned through this gateway, with their deadlines. Pure."""

import struct
from array import array
from collections.abc import Collection
from dataclasses import dataclass

from blake3 import blake3

from kvferry.core.errors import Overloaded

MAX_PREFIXES = 1000
"""Maximum number of prefixes of a gateway."""
MAX_TOKENS = 16 << 20
"""Maximum number of tokens of all prefixes of a gateway; four bytes each."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that an administrator has pinned. Prefixes with equal keys are equal."""

    key: bytes
    """Digest of the other fields."""
    token_ids: "array[int]"
    """Token ids, unsigned 32-bit."""
    tenant: str = ""
    cache_salt: str = ""
    model: str = ""
    """Name of the adapter that computes it; empty for the model itself."""

    @classmethod
    def of(cls, token_ids: Collection[int], tenant: str = "", cache_salt: str = "", model: str = "") -> "Prefix":
        """Create a prefix with its key.

        Args:
            token_ids: token ids of the prefix.
            tenant: tenant in whose cache scope the blocks are.
            cache_salt: further part of the cache scope; empty for none.
            model: name of the adapter that computes the prefix; empty for the model itself.

        Raises:
            OverflowError: a token id does not fit an unsigned 32-bit integer.
        """
        ids, digest = array("I", token_ids), blake3()
        for part in (tenant, cache_salt, model):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<Q", len(encoded)) + encoded)
        digest.update(ids.tobytes())
        return cls(digest.digest(), ids, tenant, cache_salt, model)


class PinBook:
    """Registered prefixes and their deadlines. Kept in memory only: a gateway that restarts has none."""

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES, max_tokens: int = MAX_TOKENS) -> None:
        """
        Args:
            max_prefixes: maximum number of prefixes.
            max_tokens: maximum number of tokens of all prefixes.
        """
        self._max_prefixes = max_prefixes
        self._max_tokens = max_tokens
        self._prefixes: dict[bytes, Prefix] = {}
        self._deadlines: dict[bytes, float] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._prefixes

    def add(self, prefix: Prefix, deadline: float) -> bool:
        """Register a prefix, or extend its deadline if it is registered; an earlier deadline has no effect. Return
        whether it is new.

        Args:
            prefix: the prefix.
            deadline: monotonic seconds.

        Raises:
            Overloaded: there are too many prefixes or tokens.
        """
        if prefix.key in self._prefixes:
            self._deadlines[prefix.key] = max(deadline, self._deadlines[prefix.key])
            return False
        if len(self._prefixes) >= self._max_prefixes:
            raise Overloaded(
                f"this gateway has {len(self._prefixes)} pinned prefixes, the maximum; unpin one, or wait until one "
                "expires",
                reason="PIN_QUOTA",
            )
        if self._num_tokens + len(prefix.token_ids) > self._max_tokens:
            raise Overloaded(
                f"the pinned prefixes of this gateway have {self._num_tokens} tokens; with the {len(prefix.token_ids)} "
                f"of this one they exceed {self._max_tokens}; unpin one, or wait until one expires",
                reason="PIN_QUOTA",
            )
        self._prefixes[prefix.key] = prefix
        self._deadlines[prefix.key] = deadline
        self._num_tokens += len(prefix.token_ids)
        return True

    def remove(self, key: bytes) -> bool:
        """Remove a prefix; return whether it was registered."""
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            return False
        del self._deadlines[key]
        self._num_tokens -= len(prefix.token_ids)
        return True

    def expire(self, now: float) -> None:
        """Remove the prefixes whose deadline has passed.

        Args:
            now: monotonic seconds.
        """
        for key in [key for key, deadline in self._deadlines.items() if deadline <= now]:
            self.remove(key)

    def clear(self) -> None:
        """Remove all prefixes."""
        for key in list(self._prefixes):
            self.remove(key)

    def items(self) -> list[tuple[Prefix, float]]:
        """Return each prefix with its deadline, in the order of registration."""
        return [(prefix, self._deadlines[key]) for key, prefix in self._prefixes.items()]

    def deadline(self, key: bytes) -> float | None:
        """Return the deadline of a prefix; `None` if it is not registered."""
        return self._deadlines.get(key)

    def lacking(self, known: Collection[bytes]) -> list[Prefix]:
        """Return the prefixes whose keys are not in `known`, in the order of registration."""
        return [prefix for key, prefix in self._prefixes.items() if key not in known]
