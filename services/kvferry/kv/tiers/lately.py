"""Which names were given to be stored of late, so that a prompt that is often asked for is not stored each time.

A name is remembered until it turns out not to be there: its store failed, a lookup or a load found nothing, or so many
others came since. Without that, what a tier loses (it may lose anything) would stay lost. Pure; its owner locks.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvferry.core.ids import BlockHash


class Lately:
    """A bounded set of names; those whose store still runs are not missed yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: OrderedDict[BlockHash, bool] = OrderedDict()
        """By name, the oldest first: whether its store still runs."""

    def __contains__(self, name: object) -> bool:
        return name in self._running

    def begin(self, name: BlockHash) -> None:
        """It is given to be stored."""
        self._running[name] = True
        if len(self._running) > self._most:
            self._running.popitem(last=False)

    def end(self, name: BlockHash, *, is_there: bool) -> None:
        """Its store is over."""
        if name in self._running:
            self._running[name] = False
        if not is_there:
            self.miss([name])

    def miss(self, names: Iterable[BlockHash]) -> None:
        """These were asked for and are not there."""
        for name in names:
            if self._running.get(name) is False:
                del self._running[name]
