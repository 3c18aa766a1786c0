"""Retention of prompts: keeps the blocks of a prompt that asked for it in the cache, within a share of each tenant.

    request with a time to live ──► its first token ──► hold the pages of the prompt's full blocks

A retention is a pin (`pins`) that a client's request asked for instead of an operator. It costs no computation, and it
is never an error: a request whose retention is refused is answered as any other. A longer prompt of the same
conversation replaces the retention of its beginning. Pure.

Retentions have a quota of their own, so that clients cannot take the operator's. One tenant holds at most half of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.errors import InvariantBroken, Overloaded
from kvferry.core.hashing import BlockNamer, tenant_of_scope
from kvferry.core.ids import AdapterId, BlockId, RequestId
from kvferry.core.retention import MAX_RETENTION_SECONDS, Retention, RetentionOutcome
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.pins.pins import MAX_PINS, PageUses, Pin, Pins
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate

_TENANT_PART = 2
"""One tenant holds at most this part of the quota, and of the number of retentions: one half."""
_MAX_SHARED = 8
"""References to pages that a tenant's retentions may have for each page of its quota: many retentions with a common
beginning share its pages, but each of them takes time when it ends."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A running request that asked for retention."""

    tokens: list[int]
    """The prompt's full blocks."""
    scope: str
    ttl_seconds: float
    adapter: AdapterId | None


class Retaining:
    """The retentions of one engine. Owned by the engine's thread."""

    def __init__(
        self,
        allocator: Allocator,
        *,
        share: float,
        room: Callable[[], int],
        clock: Clock,
        namer: Callable[[str], BlockNamer],
        all_uses: PageUses,
    ) -> None:
        """
        Args:
            allocator: the pages and the prefix index.
            share: maximum share of the pages that retentions hold; 0 refuses them.
            room: returns how many pages retentions may hold so that the longest request still fits.
            clock: measures the time to live.
            namer: returns the block namer of a scope.
            all_uses: counts the pages of all pins and retentions.
        """
        self._all_uses = all_uses
        self._allocator = allocator
        self._share = share
        self._room = room
        self._clock = clock
        self._namer = namer
        self._asked: dict[RequestId, _Asked] = {}
        self._tenants: dict[str, Pins] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    @property
    def num_pages(self) -> int:
        """Number of pages that retentions hold. Tenants share no blocks."""
        return sum(pins.num_pages for pins in self._tenants.values())

    @property
    def quota(self) -> int:
        """Maximum number of pages that retentions hold."""
        return max(0, min(int(self._allocator.pool.num_blocks * self._share), self._room()))

    @property
    def held(self) -> list[tuple[BlockId, ...]]:
        """Pages of each retention."""
        return [pages for pins in self._tenants.values() for pages in pins.held]

    @property
    def next_deadline(self) -> float | None:
        """Earliest end of a retention, monotonic seconds; `None` without retentions."""
        return min(
            (pins.next_deadline for pins in self._tenants.values() if pins.next_deadline is not None), default=None
        )

    def add(self, request: EngineRequest) -> None:
        """Note a request that has been accepted; its prompt is retained with its first token if it asked for that."""
        if request.retain_seconds:
            size = self._allocator.block_tokens
            num_prompt = len(request.token_ids) - request.num_generated
            tokens = request.token_ids[: num_prompt // size * size]
            ttl = min(request.retain_seconds, MAX_RETENTION_SECONDS)
            self._asked[request.request_id] = _Asked(tokens, request.scope, ttl, request.adapter)

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that was aborted."""
        self._asked.pop(request_id, None)

    def stepped(self, updates: Sequence[SequenceUpdate]) -> dict[RequestId, Retention]:
        """Retain the prompts whose first token was sampled in a step; return the result by request. To be called before
        another step is planned.

        Args:
            updates: the results of the step.
        """
        results: dict[RequestId, Retention] = {}
        if not self._asked and not self._tenants:
            return results
        if self._tenants and any(update.error is not None for update in updates):
            self._each(lambda pins: pins.keep_listed(self._allocator.is_listed))
        for update in updates:
            asked = self._asked.pop(update.request_id, None)
            if asked is not None and update.error is None:
                results[update.request_id] = self._retain(asked)
        return results

    def expire(self, now: float) -> None:
        """End the retentions whose time to live has passed.

        Args:
            now: monotonic seconds.
        """
        deadline = self.next_deadline
        if deadline is not None and deadline <= now:
            self._each(lambda pins: pins.expire(now))

    def keep_version(self, name: str, adapter: AdapterId | None) -> None:
        """End the retentions of an adapter's other versions; see `Pins.keep_version`."""
        self._each(lambda pins: pins.keep_version(name, adapter))

    def clear(self) -> None:
        """End all retentions."""
        self._each(lambda pins: pins.drop(lambda _: True))

    def close(self) -> None:
        """End all retentions and refuse further ones, because the worker drains."""
        self._is_closed = True
        self.clear()

    def check_integrity(self) -> None:
        """Check that retained pages are in the prefix index and that the quota is kept.

        Raises:
            InvariantBroken: they are not; the message has the numbers.
        """
        unlisted = [page for pages in self.held for page in pages if not self._allocator.is_listed(page)]
        if unlisted:
            raise InvariantBroken(f"retained blocks {unlisted[:8]} are not in the prefix index")
        if self.num_pages > self.quota:
            raise InvariantBroken(f"{self.num_pages} pages are retained; the quota is {self.quota}")

    # ------------------------------------------------------------------ internals

    def _each(self, end_some: Callable[[Pins], object]) -> None:
        """End retentions of each tenant, and forget the tenants that have none left."""
        for pins in self._tenants.values():
            end_some(pins)
        self._tenants = {tenant: pins for tenant, pins in self._tenants.items() if pins}

    def _retain(self, asked: _Asked) -> Retention:
        if not self._share:
            return Retention(RetentionOutcome.OFF)
        if self._is_closed:
            return Retention(RetentionOutcome.DRAINING)
        if not asked.tokens:
            return Retention(RetentionOutcome.SHORT)
        now = self._clock.monotonic()
        self.expire(now)
        names = self._namer(asked.scope).chain(asked.tokens)
        hit = self._allocator.peek(names, asked.tokens, max_tokens=len(asked.tokens))
        num_blocks = len(hit)
        if not num_blocks:
            return Retention(RetentionOutcome.EVICTED)
        tenant = tenant_of_scope(asked.scope)
        pins = self._tenants.get(tenant) or Pins(
            self._allocator.pool, lambda: self._tenant_quota(tenant), self._all_uses
        )
        num_tokens, name = num_blocks * self._allocator.block_tokens, names[num_blocks - 1]
        deadline = now + asked.ttl_seconds
        renewed = pins.renew(name, deadline)
        if renewed is not None:
            return _granted(num_tokens, renewed.deadline - now)
        if not self._has_room(pins, hit.pages):
            return Retention(RetentionOutcome.QUOTA)
        # With windows, a longer prompt may not hold the pages that a hit of its beginning reads.
        pages = set(hit.pages)
        found = (pin for pin in map(pins.find, names[: num_blocks - 1]) if pin is not None)
        earlier = [pin for pin in found if pages.issuperset(pin.pages)]
        deadline = max([deadline, *(pin.deadline for pin in earlier)])
        pins.add(Pin(name, num_tokens, num_blocks, tuple(hit.pages), deadline, asked.adapter))
        for pin in earlier:
            pins.remove(pin.name)
        self._tenants[tenant] = pins
        return _granted(num_tokens, deadline - now)

    def _has_room(self, pins: Pins, pages: Sequence[BlockId]) -> bool:
        """Return whether another retention with these pages fits beside those of its tenant and of the others."""
        if len(pins) >= MAX_PINS // _TENANT_PART or pins.num_references + len(pages) > _MAX_SHARED * pins.quota:
            return False
        try:
            pins.check_room(pins.num_unpinned(pages), num_reserved=0, num_pins=len(self) - len(pins))
        except Overloaded:
            return False
        return True

    def _tenant_quota(self, tenant: str) -> int:
        others = sum(pins.num_pages for name, pins in self._tenants.items() if name != tenant)
        return max(0, min(self.quota // _TENANT_PART, self.quota - others))


def _granted(num_tokens: int, seconds: float) -> Retention:
    return Retention(RetentionOutcome.RETAINED, num_tokens, round(seconds, 3))
