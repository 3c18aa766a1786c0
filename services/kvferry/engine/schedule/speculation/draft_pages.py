"""Pages of the KV of a draft model or of a head, by sequence. Pure.

They hold only the tokens of running sequences: nothing is shared, named or stored. If no pages are free, the pages of
the sequence with the oldest draft are freed; its tokens are computed again later.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvferry.core.ids import BlockId, RequestId


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """A sequence's tokens in the draft model."""

    tokens: list[int] = field(default_factory=list)
    """The sequence's tokens, then its last draft."""
    num_known: int = 0
    """Number of leading tokens that belong to the sequence; the others are draft tokens."""
    num_computed: int = 0
    """Number of leading tokens whose KV is in the pages."""
    blocks: list[BlockId] = field(default_factory=list)
    used: int = 0
    """Sequence number of the last use; larger is later."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Copy the sequence's current tokens. KV stays valid up to the first token that differs; only draft tokens
        can differ, so the comparison begins with them."""
        same, limit = self.num_known, min(len(tokens), len(self.tokens))
        while same < limit and self.tokens[same] == tokens[same]:
            same += 1
        del self.tokens[same:]
        self.tokens += tokens[same:]
        self.num_known = len(tokens)
        # The last token is computed again even if its KV is in the pages, since its row gives the first draft token.
        self.num_computed = min(same, self.num_computed, len(tokens) - 1)

    def extend(self, tokens: Sequence[int], first: int) -> None:
        """Replace the last draft by the sequence's new tokens. KV stays valid, since the KV of draft tokens does not
        count.

        Args:
            tokens: all current tokens of the sequence.
            first: position in `tokens` of the first token that the draft model reads; the same in all calls.
        """
        del self.tokens[self.num_known :]
        self.tokens += tokens[first + self.num_known :]
        self.num_known = len(self.tokens)

    def restart(self) -> None:
        """Drop all tokens, but keep the pages."""
        self.tokens.clear()
        self.num_known = self.num_computed = 0


class DraftPages:
    """The pages of one draft model."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        """
        Args:
            num_blocks: number of pages.
            block_tokens: tokens per page.
        """
        self.num_blocks, self._block_tokens = num_blocks, block_tokens
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._sequences: dict[RequestId, DraftedSequence] = {}
        self._uses = 0

    def sequence(self, request_id: RequestId) -> DraftedSequence:
        """Return the state of a sequence, creating it at the first use."""
        found = self._sequences.setdefault(request_id, DraftedSequence())
        self._uses += 1
        found.used = self._uses
        return found

    def grow(self, sequence: DraftedSequence, num_tokens: int, kept: Collection[RequestId]) -> bool:
        """Allocate pages for a number of tokens; return whether that was possible.

        Args:
            sequence: the sequence.
            num_tokens: number of tokens that its pages must hold.
            kept: sequences that keep their pages.
        """
        needed = -(-num_tokens // self._block_tokens) - len(sequence.blocks)
        while len(self._free) < needed:
            others = [
                (other.used, name) for name, other in self._sequences.items() if name not in kept and other.blocks
            ]
            if not others:
                return False
            self.forget(min(others)[1])
        for _ in range(needed):
            sequence.blocks.append(self._free.pop())
        return True

    def forget(self, request_id: RequestId) -> None:
        """Free the pages of a sequence. Idempotent."""
        gone = self._sequences.pop(request_id, None)
        if gone is not None:
            self._free += gone.blocks
            gone.blocks = []

    @property
    def is_idle(self) -> bool:
        """Whether no sequence has pages or a state."""
        return not self._sequences and len(self._free) == self.num_blocks
