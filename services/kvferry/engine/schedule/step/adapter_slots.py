"""Adapter slots: which adapters the sequences of a step may use. Pure.

A step computes with at most as many adapters as there are slots. A slot is in use while an admitted sequence has its
adapter, and keeps the adapter afterwards, until another adapter needs the slot: the least recently used one is replaced
(Sheng et al., S-LoRA, 2024, section 4).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import AdapterId

NO_SLOT = -1
"""Slot of a sequence that has no adapter or is not admitted."""
MAX_SLOTS = 1024
"""Largest number of slots."""


class PackedAdapter(Protocol):
    """An adapter in the form that a model's kernels read (`Model.pack_adapter`)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        ...


class AdapterSlots:
    """The adapter slots of one engine. Not thread-safe."""

    def __init__(self, num_slots: int, is_in_memory: Callable[[AdapterId], bool] = lambda _: True) -> None:
        """
        Args:
            num_slots: number of slots.
            is_in_memory: function that returns whether an adapter's weights are in memory, and has them loaded
                otherwise.
        """
        self._is_in_memory = is_in_memory
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[AdapterId, int] = {}
        self._users: dict[AdapterId, int] = {}
        self._idle: OrderedDict[AdapterId, None] = OrderedDict()
        self._activations: list[tuple[int, AdapterId]] = []
        self.num_slots = num_slots
        self.num_activations = self.num_evictions = 0
        """Number of times that an adapter was put into a slot, and of times that it replaced another one."""

    def is_ready(self, adapter: AdapterId) -> bool:
        """Return whether an adapter's weights are in its slot or in memory; if not, they are being loaded."""
        return adapter in self._slots or self._is_in_memory(adapter)

    def can_take(self, adapter: AdapterId) -> bool:
        """Return whether a sequence with this adapter can be admitted."""
        return adapter in self._slots or bool(self._free) or bool(self._idle)

    def take(self, adapter: AdapterId) -> int:
        """Return the adapter slot of an admitted sequence; `give_back` must be called when the sequence ends.

        Raises:
            InvariantBroken: every slot is in use; see `can_take`.
        """
        slot = self._slots.get(adapter)
        if slot is None:
            slot = self._free_slot()
            self._slots[adapter] = slot
            self._activations.append((slot, adapter))
            self.num_activations += 1
        self._idle.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return slot

    def give_back(self, adapter: AdapterId) -> None:
        """Record that an admitted sequence with this adapter has ended or waits again."""
        count = self._users[adapter] - 1
        if count:
            self._users[adapter] = count
            return
        del self._users[adapter]
        if adapter in self._slots:
            self._idle[adapter] = None

    def forget(self, adapter: AdapterId) -> None:
        """Free an adapter's slot if no sequence uses the adapter; no effect otherwise."""
        if adapter in self._idle:
            del self._idle[adapter]
            self._free.append(self._slots.pop(adapter))
            self._activations = [item for item in self._activations if item[1] != adapter]

    def take_activations(self) -> list[tuple[int, AdapterId]]:
        """Return the adapters that were put into slots since the last call, whose weights must be copied."""
        activations, self._activations = self._activations, []
        return activations

    def holds(self, adapter: AdapterId) -> bool:
        """Return whether an adapter has a slot."""
        return adapter in self._slots

    @property
    def running(self) -> tuple[AdapterId, ...]:
        """Adapters of admitted sequences."""
        return tuple(self._users)

    @property
    def num_users(self) -> int:
        """Number of admitted sequences with an adapter."""
        return sum(self._users.values())

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._idle:
            raise InvariantBroken(f"all {self.num_slots} adapter slots are in use")
        replaced, _ = self._idle.popitem(last=False)
        self._activations = [item for item in self._activations if item[1] != replaced]
        self.num_evictions += 1
        return self._slots.pop(replaced)
