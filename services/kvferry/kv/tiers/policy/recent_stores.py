"""Names of recently stored objects, kept so that the objects of a frequent prompt are not stored each time.

A name is removed when its object is missing (its store failed, or a lookup or load did not find it) or after many other
names were added, so that an object that a tier has dropped can be stored a second time. Pure, not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvferry.core.ids import BlockHash


class RecentStores:
    """Bounded set of recently stored names. A miss does not remove a name whose store is running."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: OrderedDict[BlockHash, bool] = OrderedDict()
        """For each name, oldest first, whether a store is running."""

    def __contains__(self, name: object) -> bool:
        return name in self._running

    def begin(self, name: BlockHash) -> None:
        """Record the start of a store."""
        self._running[name] = True
        if len(self._running) > self._limit:
            self._running.popitem(last=False)

    def end(self, name: BlockHash, *, is_there: bool) -> None:
        """Record the end of a store.

        Args:
            name: name of the object.
            is_there: whether all tiers have the object now.
        """
        if name in self._running:
            self._running[name] = False
        if not is_there:
            self.miss([name])

    def miss(self, names: Iterable[BlockHash]) -> None:
        """Remove names whose objects were requested and not found."""
        for name in names:
            if self._running.get(name) is False:
                del self._running[name]
