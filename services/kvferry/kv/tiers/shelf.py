"""Which object lies in which slot of a bounded memory, and who goes next: the decisions of the DRAM tier.

    ABSENT --reserve--> WRITING --commit--> READY --evict--> ABSENT
                           |                 | ^
                           +--abandon        pin / unpin: a pinned object is being read and stays

Only READY objects are found, only READY and unpinned ones are evicted. Who goes:

- The victim belongs to the tenant that holds most, so a tenant that floods the shelf evicts itself and nobody with
  less than an equal share; with one tenant this is plain least-recently-used.
- A newcomer that was asked for less often than the victim is declined (`frequency`), so that a long scan does not wash
  out what is used; on a tie the newcomer wins, so recency decides among equals.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.frequency import FrequencySketch
from kvferry.kv.tiers.tier import ObjectKey, Presence


@dataclass(slots=True)
class _Entry:
    slot: int
    tenant: str
    ready: bool = False
    pins: int = 0


class Shelf:
    """The book of one arena of slots. Not safe for several threads; its owner locks."""

    def __init__(self, num_slots: int, *, tenant_slots: int | None = None) -> None:
        """
        Args:
            num_slots: objects it can hold, at least 1.
            tenant_slots: most that one tenant may hold, however empty the rest; `None`: all.

        Raises:
            ValueError: a bound is not positive.
        """
        if num_slots < 1 or (tenant_slots is not None and tenant_slots < 1):
            raise ValueError(f"a shelf has at least one slot, for each tenant too; not {num_slots}, {tenant_slots}")
        self.num_slots = num_slots
        self._tenant_slots = num_slots if tenant_slots is None else min(tenant_slots, num_slots)
        self._entries: dict[BlockHash, _Entry] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._order: dict[str, OrderedDict[BlockHash, None]] = {}
        """By tenant: READY and unpinned names, least recently used first."""
        self._held: dict[str, int] = {}
        """Slots by tenant, whatever their state."""
        self._asked = FrequencySketch(num_slots)
        self.num_evicted = 0
        self.num_declined = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: BlockHash) -> Presence:
        """Where a name stands; changes nothing."""
        entry = self._entries.get(name)
        if entry is None:
            return Presence.NO
        return Presence.YES if entry.ready else Presence.NOT_YET

    def ask(self, names: list[BlockHash]) -> None:
        """A request wants these, in order of position: count them and renew them, the root of the chain last, so that
        no object outlives those it depends on."""
        for name in reversed(names):
            self._asked.count(name)
            entry = self._entries.get(name)
            if entry is not None and entry.ready and not entry.pins:
                self._order[entry.tenant].move_to_end(name)

    def reserve(self, key: ObjectKey) -> int | None:
        """A slot to write an object into; `None` when it is here already, or declined, or everything is in use."""
        if key.name in self._entries:
            return None
        slot = self._take_slot(key)
        if slot is None:
            self.num_declined += 1
            return None
        self._entries[key.name] = _Entry(slot, key.tenant)
        self._held[key.tenant] = self._held.get(key.tenant, 0) + 1
        return slot

    def commit(self, name: BlockHash) -> None:
        """The object is whole: from now on it is found.

        Raises:
            InvariantBroken: nobody was writing it.
        """
        entry = self._writing(name)
        entry.ready = True
        self._order.setdefault(entry.tenant, OrderedDict())[name] = None

    def abandon(self, name: BlockHash) -> None:
        """The object will not come; its slot is free.

        Raises:
            InvariantBroken: nobody was writing it.
        """
        self._drop(name, self._writing(name))

    def pin(self, name: BlockHash) -> int | None:
        """The slot of a READY object, which stays until `unpin`; `None` if it is not there."""
        entry = self._entries.get(name)
        if entry is None or not entry.ready:
            return None
        if entry.pins == 0:
            del self._order[entry.tenant][name]
        entry.pins += 1
        return entry.slot

    def unpin(self, name: BlockHash) -> None:
        """One reader less; the last makes it the most recently used.

        Raises:
            InvariantBroken: it was not pinned.
        """
        entry = self._entries.get(name)
        if entry is None or entry.pins < 1:
            raise InvariantBroken("an object was unpinned that nobody had pinned")
        entry.pins -= 1
        if entry.pins == 0:
            self._order.setdefault(entry.tenant, OrderedDict())[name] = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody reads or writes any object."""
        return all(e.ready and not e.pins for e in self._entries.values())

    def check_integrity(self) -> None:
        """Every slot is free or held by one object, every tenant's count is right, and the order holds exactly the
        objects that may go.

        Raises:
            InvariantBroken: with the numbers.
        """
        slots = sorted([*self._free, *(e.slot for e in self._entries.values())])
        if slots != list(range(self.num_slots)):
            raise InvariantBroken(f"{len(slots)} slots are accounted for, of {self.num_slots}")
        held: dict[str, int] = {}
        for entry in self._entries.values():
            held[entry.tenant] = held.get(entry.tenant, 0) + 1
        if held != {t: n for t, n in self._held.items() if n}:
            raise InvariantBroken(f"tenants hold {held}, counted {self._held}")
        order = {name for names in self._order.values() for name in names}
        if order != {name for name, e in self._entries.items() if e.ready and not e.pins}:
            raise InvariantBroken(f"{len(order)} objects may go, of {len(self._entries)}")

    def _take_slot(self, key: ObjectKey) -> int | None:
        if self._held.get(key.tenant, 0) >= self._tenant_slots:
            owner: str | None = key.tenant
        elif self._free:
            return self._free.pop()
        else:
            owner = self._largest(key.tenant)
        victim = next(iter(self._order.get(owner, ())), None) if owner is not None else None
        if victim is None or self._asked.estimate(victim) > self._asked.estimate(key.name):
            return None
        self.num_evicted += 1
        self._drop(victim, self._entries[victim])
        return self._free.pop()

    def _largest(self, asking: str) -> str | None:
        """The tenant that holds most, among those with something that may go; the asking one on a tie."""
        able = [t for t, names in self._order.items() if names]
        return max(able, key=lambda t: (self._held[t], t == asking), default=None)

    def _writing(self, name: BlockHash) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or entry.ready:
            raise InvariantBroken("an object was to be finished that nobody was writing")
        return entry

    def _drop(self, name: BlockHash, entry: _Entry) -> None:
        del self._entries[name]
        names = self._order.get(entry.tenant)
        if names is not None:
            names.pop(name, None)
            if not names:
                del self._order[entry.tenant]
        self._held[entry.tenant] -= 1
        if not self._held[entry.tenant]:
            del self._held[entry.tenant]
        self._free.append(entry.slot)
