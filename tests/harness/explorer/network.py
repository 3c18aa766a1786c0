"""Messages in flight; they are immutable and unordered."""

from typing import Any, NamedTuple

ANY_LIFE = -1


class Message(NamedTuple):
    """A message between two actors."""

    kind: str
    src: str
    src_life: int
    to: str
    to_life: int
    """Incarnation of the receiver: that of the caller for responses, any (`ANY_LIFE`) for requests."""
    body: tuple[Any, ...]
    late: bool = False
    """Whether time may pass before the message is delivered."""

    def label(self) -> str:
        """Format the message as text, for traces."""
        parts = " ".join(str(part) for part in self.body if isinstance(part, str | int | bool | tuple))
        return f"{self.kind} {self.src}>{self.to} {parts}{' (late)' if self.late else ''}"


CONTROL = frozenset({"describe", "described", "claim", "claimed", "refused", "renew", "finish", "release"})
"""Kinds of unary control messages, which may be lost, delayed or duplicated."""
REPEATED = frozenset({"claim", "renew", "finish", "release"})
"""Kinds of idempotent requests, which may be duplicated."""
STREAMS = frozenset({"prefill", "prefilled", "decode", "decoded", "rejected"})
"""Kinds of messages of streaming calls: they are delivered in order, or the connection breaks and both ends detect
it."""
