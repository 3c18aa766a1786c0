"""Pinning: computes a prefix with an ordinary request of one output token, then pins its full blocks.

    pin ──► blocks cached? ── yes ─────────────────────────► hold the pages, reply
               └─ no ──► request: chunks, prefix hits, tiers ──► its last step ──► hold the pages, reply

The pages are held in the step that ends the request, before another step can reuse them. If the cache lost a block
meanwhile, for example by a reset, the request is repeated. Pure.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, InvariantBroken, KvferryError, Unavailable
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import AdapterId, BlockHash, RequestId
from kvferry.core.sampling import FinishReason, SamplingParams
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.messages import EngineRequest, PinnedPrefix, PinReply
from kvferry.engine.schedule.pins.pins import MAX_TTL_SECONDS, PageUses, Pin, Pins
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.kv.pages.layer_groups import handed_over

_MAX_ATTEMPTS = 3
"""Number of times that a prefix is computed before its pin is refused."""
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(slots=True)
class _Pending:
    """A prefix that is being computed."""

    request: EngineRequest
    """The request; its tokens are those of the full blocks."""
    names: list[BlockHash]
    num_reserved: int
    """Number of pages that are reserved for the pin."""
    deadline: float
    reply: PinReply
    num_attempts: int = 1


class Pinning:
    """Pins prefixes in one engine. Owned by the engine's thread."""

    def __init__(
        self,
        allocator: Allocator,
        *,
        share: float,
        room: Callable[[], int],
        clock: Clock,
        add: Callable[[EngineRequest], None],
        check: Callable[[EngineRequest], None],
        namer: Callable[[str], BlockNamer],
        all_uses: PageUses,
    ) -> None:
        """
        Args:
            allocator: the pages and the prefix index.
            share: maximum share of the pages that are pinned; 0 refuses pins.
            room: returns how many pages pins may hold so that the longest request still fits.
            clock: measures the time to live.
            add: runs a request.
            check: raises an error if a request is invalid.
            namer: returns the block namer of a scope.
            all_uses: counts the pages of all pins and retentions.
        """
        self._allocator = allocator
        self._share = share
        self._room = room
        self._clock = clock
        self._add = add
        self._check = check
        self._namer = namer
        self._pending: dict[RequestId, _Pending] = {}
        self._is_closed = False
        self.pins = Pins(allocator.pool, self._quota, all_uses)
        """The pins."""

    def pin(self, request: EngineRequest, ttl_seconds: float, reply: PinReply) -> None:
        """Pin the full blocks of a prompt, or extend the pin of the same blocks; `reply` is called now or after a later
        step.

        Args:
            request: the prompt with its scope and adapter; its sampling parameters have no effect.
            ttl_seconds: time to live in seconds from now.
            reply: called with the pin; with an `InvalidRequest` if the prompt or the time to live is invalid, an
                `Overloaded` if the quota does not suffice or too many requests wait, or another error if the prefix
                cannot be computed.
        """
        try:
            self._begin(request, ttl_seconds, reply)
        except InvariantBroken:
            raise
        except KvferryError as error:
            reply(error)

    def unpin(self, scope: str, token_ids: list[int]) -> PinnedPrefix | None:
        """End the pin of a prompt's full blocks; return it as it was, or `None` if there is none.

        Args:
            scope: scope of the pin's block names (`core.hashing.cache_scope`).
            token_ids: tokens of the prompt; those after the last full block are ignored.
        """
        names = self._namer(scope).chain(token_ids)
        pin = self.pins.remove(names[-1]) if names else None
        return None if pin is None else self._reported(pin)

    def ended(self, updates: Iterable[SequenceUpdate]) -> None:
        """Pin the prefixes whose requests ended in a step, and drop pins of blocks that a failure removed from the
        cache. To be called before another step is planned."""
        if not self._pending and not self.pins:
            return
        for update in updates:
            if update.error is not None and self.pins:
                self.pins.keep_listed(self._allocator.is_listed)
            if update.error is None and update.finish_reason is None:
                continue
            pending = self._pending.pop(update.request_id, None)
            if pending is None:
                continue
            if update.error is not None:
                pending.reply(update.error)
                continue
            if update.finish_reason is FinishReason.ABORT:
                pending.reply(Unavailable("generation was paused, which ended this request; retry"))
                continue
            try:
                self._complete(pending)
            except InvariantBroken:
                raise
            except KvferryError as error:
                pending.reply(error)

    def expire(self) -> None:
        """End the pins whose time to live has passed."""
        if self.pins:
            self.pins.expire(self._clock.monotonic())

    def forget(self, request_id: RequestId) -> None:
        """Drop the request of a pin whose caller was cancelled; no reply is sent."""
        self._pending.pop(request_id, None)

    def clear(self) -> int:
        """End all pins; return their number. Prefixes that are being computed are pinned when they are complete."""
        return self.pins.drop(lambda _: True)

    def close(self) -> None:
        """End all pins and refuse further ones, because the worker drains."""
        self._is_closed = True
        self.clear()

    def keep_version(self, name: str, adapter: AdapterId | None) -> None:
        """End the pins of an adapter's other versions; see `Pins.keep_version`."""
        self.pins.keep_version(name, adapter)

    def check_integrity(self) -> None:
        """Check that pinned pages are in the prefix index and that the quota is kept.

        Raises:
            InvariantBroken: they are not; the message has the numbers.
        """
        unlisted = [page for pages in self.pins.held for page in pages if not self._allocator.is_listed(page)]
        if unlisted:
            raise InvariantBroken(f"pinned blocks {unlisted[:8]} are not in the prefix index")
        if self.pins.num_pages > self.pins.quota:
            raise InvariantBroken(f"{self.pins.num_pages} pages are pinned; the quota is {self.pins.quota}")

    # ------------------------------------------------------------------ internals

    def _quota(self) -> int:
        return max(0, min(int(self._allocator.pool.num_blocks * self._share), self._room()))

    def _begin(self, request: EngineRequest, ttl_seconds: float, reply: PinReply) -> None:
        if not (math.isfinite(ttl_seconds) and 0 < ttl_seconds <= MAX_TTL_SECONDS):
            raise InvalidRequest(
                f"ttl_seconds must be above 0 and at most {MAX_TTL_SECONDS:.0f}, not {ttl_seconds}", field="ttl_seconds"
            )
        if not self._share:
            raise InvalidRequest("this worker pins no prefixes; start it with --pin-share above 0", field="pin_share")
        size = self._allocator.block_tokens
        num_tokens = len(request.token_ids) // size * size
        request = replace(request, token_ids=request.token_ids[:num_tokens] or request.token_ids, sampling=_ONE_TOKEN)
        self._check(request)
        if not num_tokens:
            raise InvalidRequest(
                f"the prefix has {len(request.token_ids)} tokens; only full blocks of {size} tokens are pinned",
                field="token_ids",
            )
        self._check_open()
        names = self._namer(request.scope).chain(request.token_ids)
        deadline = self._clock.monotonic() + ttl_seconds
        self.expire()
        pin = self.pins.renew(names[-1], deadline)
        if pin is not None:
            reply(self._reported(pin))
            return
        pending = _Pending(request, names, 0, deadline, reply)
        if self._hold(pending):
            return
        self._reserve(pending)
        self._add(request)
        self._pending[request.request_id] = pending

    def _complete(self, pending: _Pending) -> None:
        """Pin the blocks of a computed prefix, or compute it again if the cache has lost a block.

        Raises:
            Overloaded: the quota does not suffice any more, or too many requests wait.
            Unavailable: blocks were lost after each attempt, or the worker drains.
        """
        self._check_open()
        pin = self.pins.renew(pending.names[-1], pending.deadline)
        if pin is not None:
            pending.reply(self._reported(pin))
        elif not self._hold(pending):
            if pending.num_attempts == _MAX_ATTEMPTS:
                raise Unavailable(
                    f"blocks of the prefix were removed from the cache while it was computed, {_MAX_ATTEMPTS} times; "
                    "retry",
                    retry_after_seconds=1.0,
                )
            pending.num_attempts += 1
            self._add(pending.request)
            self._pending[pending.request.request_id] = pending

    def _hold(self, pending: _Pending) -> bool:
        """Pin a prefix if all its blocks are cached, and reply; return whether they are.

        Raises:
            Overloaded: the quota does not suffice.
        """
        tokens = pending.request.token_ids
        hit = self._allocator.peek(pending.names, tokens, max_tokens=len(tokens))
        if len(hit) < len(pending.names):
            return False
        self._check_room(pending, self.pins.num_unpinned(hit.pages))
        adapter = pending.request.adapter
        pin = Pin(pending.names[-1], len(tokens), len(hit), tuple(hit.pages), pending.deadline, adapter)
        self.pins.add(pin)
        pending.reply(self._reported(pin))
        return True

    def _reserve(self, pending: _Pending) -> None:
        """Reserve pages of the quota for a prefix that is going to be computed.

        Raises:
            Overloaded: the quota does not suffice.
        """
        tokens, size = pending.request.token_ids, self._allocator.block_tokens
        total = sum(map(len, handed_over(len(tokens), self._allocator.windows, size)))
        cached = self._allocator.peek(pending.names, tokens, max_tokens=len(tokens)).pages
        shared = len(cached) - self.pins.num_unpinned(cached)
        pending.num_reserved = max(0, total - shared)
        self._check_room(pending, pending.num_reserved)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("this worker is draining and pins no prefixes", reason="DRAINING")

    def _check_room(self, pending: _Pending, num_pages: int) -> None:
        name = pending.names[-1]
        others = {one.names[-1]: one.num_reserved for one in self._pending.values() if one.names[-1] != name}
        self.pins.check_room(num_pages, num_reserved=sum(others.values()), num_pins=len(others))

    def _reported(self, pin: Pin) -> PinnedPrefix:
        seconds_left = max(0.0, pin.deadline - self._clock.monotonic())
        return PinnedPrefix(pin.name, pin.num_tokens, pin.num_blocks, seconds_left)
