"""Blocks of prompts that the gateway has sent to a replica, with the time of dispatch.

They serve two purposes. For a short time they count as present on a replica with an exact map, until the feed reports
them (optimistic insertion), so that requests with the same new prefix go to the same replica. For a longer time they
replace the map of a replica whose cache is unknown.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class DispatchedBlocks:
    """The blocks dispatched to one replica. When the limit is exceeded, the oldest are dropped."""

    __slots__ = ("_history", "_pending")

    def __init__(self) -> None:
        self._history: OrderedDict[int, float] = OrderedDict()
        self._pending: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._history)

    def add(self, keys: Sequence[int], now: float, max_blocks: int, num_confirmed: int = 0) -> None:
        """Add the blocks of a prompt.

        Args:
            keys: keys of the prompt's leading blocks, in order.
            now: monotonic seconds.
            max_blocks: the limit.
            num_confirmed: number of leading blocks that the feed has reported; they are not pending.
        """
        history, pending = self._history, self._pending
        for key in keys:
            history[key] = now
            history.move_to_end(key)
        for key in keys[num_confirmed:]:
            pending[key] = now
        while len(history) > max_blocks:
            oldest, _ = history.popitem(last=False)
            pending.pop(oldest, None)

    def confirm(self, keys: Iterable[int]) -> None:
        """Note that the feed has reported these blocks as stored."""
        pending = self._pending
        if pending:
            for key in keys:
                pending.pop(key, None)

    def forget(self, keys: Iterable[int]) -> None:
        """Drop blocks that the feed has reported as removed, except those of a dispatch not yet confirmed."""
        history, pending = self._history, self._pending
        if history:
            for key in keys:
                if key not in pending:
                    history.pop(key, None)

    def clear(self) -> None:
        """Drop all blocks, after a restart of the replica."""
        self._history.clear()
        self._pending.clear()

    def is_pending(self, key: int, since: float) -> bool:
        """Return whether the block was dispatched at or after `since` and is not confirmed.

        Args:
            key: leading bits of the block's name.
            since: monotonic seconds.
        """
        return self._pending.get(key, -math.inf) >= since

    def is_known(self, key: int, since: float) -> bool:
        """Return whether the block was dispatched at or after `since`.

        Args:
            key: leading bits of the block's name.
            since: monotonic seconds.
        """
        return self._history.get(key, -math.inf) >= since
