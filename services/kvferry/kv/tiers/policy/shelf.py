"""Space allocation, eviction and admission in the DRAM tier.

    ABSENT --reserve--> WRITING --commit--> READY --evict--> ABSENT
                           |                 | ^
                           +--abandon        pin / unpin: a pinned object is being read and is not evicted

Only READY objects are found, and only READY objects that are not pinned are evicted. Eviction policy:

- The victim belongs to the tenant with the most stored objects, so that a tenant that floods the tier evicts its own
  objects, not those of a tenant below an equal share; with one tenant this is plain LRU.
- A new object that was requested less often than the victim is rejected (`frequency`), so that a long scan does not
  evict the working set; on a tie the new object is admitted, so that recency decides.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence
from kvferry.kv.tiers.policy.frequency import FrequencySketch


@dataclass(slots=True)
class _Entry:
    slot: int
    tenant: str
    ready: bool = False
    pins: int = 0


class Shelf:
    """Slot allocation for one arena. Not thread-safe."""

    def __init__(self, num_slots: int, *, tenant_slots: int | None = None) -> None:
        """
        Args:
            num_slots: capacity in objects, at least 1.
            tenant_slots: maximum number of slots per tenant, even if slots are free; default: no maximum.

        Raises:
            ValueError: `num_slots` or `tenant_slots` is not positive.
        """
        if num_slots < 1 or (tenant_slots is not None and tenant_slots < 1):
            raise ValueError(f"num_slots and tenant_slots must be positive, not {num_slots} and {tenant_slots}")
        self.num_slots = num_slots
        self._tenant_slots = num_slots if tenant_slots is None else min(tenant_slots, num_slots)
        self._entries: dict[BlockHash, _Entry] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._order: dict[str, OrderedDict[BlockHash, None]] = {}
        """READY and unpinned names by tenant, least recently used first."""
        self._held: dict[str, int] = {}
        """Number of occupied slots by tenant, in any state."""
        self._asked = FrequencySketch(num_slots)
        self.num_evicted = 0
        self.num_declined = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: BlockHash) -> Presence:
        """Return the presence of a name without counting the access."""
        entry = self._entries.get(name)
        if entry is None:
            return Presence.NO
        return Presence.YES if entry.ready else Presence.NOT_YET

    def ask(self, names: list[BlockHash]) -> None:
        """Count a request's access to names, given in order of position. Recency is updated from the last name to the
        first, so that no object is evicted before an object that depends on it."""
        for name in reversed(names):
            self._asked.count(name)
            entry = self._entries.get(name)
            if entry is not None and entry.ready and not entry.pins:
                self._order[entry.tenant].move_to_end(name)

    def reserve(self, key: ObjectKey) -> int | None:
        """Reserve a slot for writing an object; return `None` if the object is already stored or is rejected, or if all
        slots are in use."""
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
        """Mark a reserved object READY.

        Raises:
            InvariantBroken: the object was not WRITING.
        """
        entry = self._writing(name)
        entry.ready = True
        self._order.setdefault(entry.tenant, OrderedDict())[name] = None

    def abandon(self, name: BlockHash) -> None:
        """Free the slot of an object that was not written.

        Raises:
            InvariantBroken: the object was not WRITING.
        """
        self._drop(name, self._writing(name))

    def pin(self, name: BlockHash) -> int | None:
        """Pin a READY object until `unpin`; return its slot, or `None` if it is not READY."""
        entry = self._entries.get(name)
        if entry is None or not entry.ready:
            return None
        if entry.pins == 0:
            del self._order[entry.tenant][name]
        entry.pins += 1
        return entry.slot

    def unpin(self, name: BlockHash) -> None:
        """Remove one pin; when the last pin is removed, the object becomes the most recently used.

        Raises:
            InvariantBroken: the object was not pinned.
        """
        entry = self._entries.get(name)
        if entry is None or entry.pins < 1:
            raise InvariantBroken("unpin of an object that is not pinned")
        entry.pins -= 1
        if entry.pins == 0:
            self._order.setdefault(entry.tenant, OrderedDict())[name] = None

    @property
    def is_idle(self) -> bool:
        """Whether no object is pinned or WRITING."""
        return all(e.ready and not e.pins for e in self._entries.values())

    def check_integrity(self) -> None:
        """Check that every slot is free or held by one object, that the counts by tenant match, and that the LRU order
        contains exactly the objects that can be evicted.

        Raises:
            InvariantBroken: a check failed; the message has the observed counts.
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
            raise InvariantBroken(f"{len(order)} of {len(self._entries)} objects are in the LRU order")

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
        """Return the tenant with the most slots among tenants with an evictable object; `asking` on a tie."""
        able = [t for t, names in self._order.items() if names]
        return max(able, key=lambda t: (self._held[t], t == asking), default=None)

    def _writing(self, name: BlockHash) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or entry.ready:
            raise InvariantBroken("commit or abandon of an object that is not WRITING")
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
