"""Messages on their way: plain values, in no order."""

from typing import Any, NamedTuple

ANY_LIFE = -1


class Message(NamedTuple):
    """One message between two actors."""

    kind: str
    src: str
    src_life: int
    to: str
    to_life: int
    """Answers go to the life that asked; requests go to an address, whoever lives there (`ANY_LIFE`)."""
    body: tuple[Any, ...]
    late: bool = False
    """Time may pass before it arrives."""

    def label(self) -> str:
        """One message in words."""
        parts = " ".join(str(part) for part in self.body if isinstance(part, str | int | bool | tuple))
        return f"{self.kind} {self.src}>{self.to} {parts}{' (late)' if self.late else ''}"


CONTROL = frozenset({"describe", "described", "claim", "claimed", "refused", "renew", "finish", "release"})
"""Each a call of its own: it may be lost, late, or sent again."""
REPEATED = frozenset({"claim", "renew", "finish", "release"})
"""Promised to be idempotent."""
STREAMS = frozenset({"prefill", "prefilled", "decode", "decoded", "rejected"})
"""Parts of a long call over one connection: they arrive in order or the connection breaks, and both ends see it."""
