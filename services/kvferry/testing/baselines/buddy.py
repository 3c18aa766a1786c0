"""Buddy allocation of contiguous chunks, as in the Orca baselines (Kwon et al., PagedAttention, 2023, section 6.1)."""

from kvferry.core.errors import InvariantBroken

MIN_CHUNK = 16
"""Number of slots of the smallest chunk."""


class BuddyMemory:
    """Token slots that are allocated in chunks whose sizes are powers of two."""

    def __init__(self, num_slots: int, largest: int) -> None:
        """
        Args:
            num_slots: number of slots of the memory; slots beyond the last multiple of `MIN_CHUNK` are never used.
            largest: number of slots of the largest chunk, a power of two.
        """
        self.num_slots = num_slots
        self.num_taken = 0
        self._largest = largest
        self._free: dict[int, set[int]] = {}
        start, size = 0, largest
        while size >= MIN_CHUNK:
            while num_slots - start >= size:
                self._free.setdefault(size, set()).add(start)
                start += size
            size //= 2

    def size_of(self, num_slots: int) -> int:
        """Return the chunk size for a number of slots.

        Raises:
            InvariantBroken: no chunk is large enough.
        """
        if num_slots > self._largest:
            raise InvariantBroken(f"{num_slots} slots were requested; the largest chunk has {self._largest}")
        return max(MIN_CHUNK, 1 << (num_slots - 1).bit_length())

    def fits(self, num_slots: int) -> bool:
        """Return whether a chunk for this number of slots is free."""
        return any(self._free.get(size) for size in self._sizes_from(self.size_of(num_slots)))

    def take(self, num_slots: int) -> tuple[int, int] | None:
        """Allocate a chunk; return its start and size, or `None` if none is free."""
        wanted = self.size_of(num_slots)
        found = next((size for size in self._sizes_from(wanted) if self._free.get(size)), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > wanted:  # split, and keep the lower half
            found //= 2
            self._free.setdefault(found, set()).add(start + found)
        self.num_taken += wanted
        return start, wanted

    def give(self, chunk: tuple[int, int]) -> None:
        """Free a chunk, and merge it with its buddy as long as the buddy is free."""
        start, size = chunk
        self.num_taken -= size
        while size < self._largest and (start ^ size) in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free.setdefault(size, set()).add(start)

    def _sizes_from(self, size: int) -> list[int]:
        sizes = []
        while size <= self._largest:
            sizes.append(size)
            size *= 2
        return sizes
