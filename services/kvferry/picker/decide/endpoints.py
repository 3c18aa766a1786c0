"""The endpoints of a pool: their reported load, how far it is trusted, and the requests that this picker sent. No I/O.

The load of an endpoint is what its last page reports, plus the requests that were sent to it since; never less than the
requests of this picker that are still running there. A page that lies can therefore take no more than it is believed
until its own requests show, and a page that does not change, or does not come, loses trust by age:

    fresh     the page is current
    stale     it is old, or has been identical for long: the load is at least the mean of the fleet
    lost      nothing is known: used only if no other endpoint is
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.clock import Clock
from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.estimates.estimates import Commitment, Commitments, Estimates, Process
from kvferry.gateway.decide.routing.routes import Place, Replica
from kvferry.picker.decide.engine_metrics import EngineLoad, SumCount
from kvferry.picker.decide.prefix_history import PrefixHistory
from kvferry.picker.decide.prompt_body import BYTES_PER_TOKEN, CHUNK_BYTES

FROZEN_SECONDS = 10.0
"""Time for which a page with load may be identical, to the byte, before it is stale: counters of a server that works
change with each step."""
_MISSED = 5
"""Number of intervals between scrapes after which a page is old."""
_MIN_FRESH_SECONDS = 1.0
_DEFAULT_BLOCK_TOKENS = 16
_MAX_MEAN = 1 << 20
"""Largest mean, in tokens or seconds, that is learned from a page."""
_ROOM = 16
"""Requests that an endpoint without waiting ones takes between two pages."""


class Trust(StrEnum):
    """How far the reported load of an endpoint is believed; see the module."""

    FRESH = "fresh"
    STALE = "stale"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class PoolEndpoint:
    """An endpoint as listed."""

    address: str
    """`ip:port` for requests, unique in the pool."""
    name: str
    """Stable name, by which prefixes are distributed: the pod's, or the address."""
    metrics_address: str
    """`host:port` of its metrics."""
    is_prefill: bool = False
    """Whether it only computes prompts, for other endpoints."""
    is_stopping: bool = False
    place: Place = Place()  # noqa: RUF009  frozen


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that this picker has sent to an endpoint."""

    address: str
    prefill_address: str
    sent_at: float
    commitment: Commitment | None
    """The prompt that is computed; `None` once the response has begun."""
    is_open: bool = True


@dataclass(slots=True)
class EndpointState:
    """What is known of one endpoint."""

    listed: PoolEndpoint
    load: EngineLoad | None = None
    scraped_at: float = -math.inf
    """Time at which the scrape of `load` began."""
    page_digest: bytes = b""
    changed_at: float = -math.inf
    incarnation: int = 0
    """Number of restarts that the counters showed."""
    failure: str = "not scraped yet"
    sent: dict[SentRequest, None] = field(default_factory=dict)
    """Running requests of this picker."""
    unconfirmed: list[float] = field(default_factory=list)
    """Times at which requests were sent whose end is not known, until a page includes them."""

    def since(self) -> int:
        """Return the number of requests that were sent after the last page, or may have been."""
        count = len(self.unconfirmed)
        for one in reversed(self.sent):  # in the order of their times
            if one.sent_at < self.scraped_at:
                break
            count += 1
        return count

    def waiting(self) -> int:
        """Return the number of requests that wait there: those of the page and, as far as they exceed what probably
        runs at once, the later ones."""
        if self.load is None:
            return 0
        since = self.since()
        return self.load.waiting + (since if self.load.waiting else max(0, since - max(_ROOM, self.load.running)))


class EndpointStates:
    """The endpoints of one pool. Not thread-safe."""

    def __init__(self, clock: Clock, *, scrape_seconds: float, stale_seconds: float) -> None:
        """
        Args:
            clock: clock of all times.
            scrape_seconds: interval between two scrapes of an endpoint.
            stale_seconds: age of a page at which it is lost.
        """
        self._clock = clock
        self._fresh_seconds = max(_MISSED * scrape_seconds, _MIN_FRESH_SECONDS)
        self._stale_seconds = max(stale_seconds, self._fresh_seconds)
        self.by_address: dict[str, EndpointState] = {}
        self.generation = 0
        """Number of changes of the list."""
        self.history = PrefixHistory()
        self.estimates = Estimates()
        self.commitments = Commitments(clock)
        self._total_load = self._num_known = 0
        self._mean_prompt = 512.0

    # -- the list ----------------------------------------------------------------------------------------------------

    def follow(self, listed: Iterable[PoolEndpoint]) -> None:
        """Replace the list. Requests to endpoints that are gone go on, and are no longer counted."""
        new = {endpoint.address: endpoint for endpoint in listed}
        for address in [address for address in self.by_address if address not in new]:
            self._remove(address)
        for address, endpoint in new.items():
            state = self.by_address.get(address)
            if state is not None and state.listed.name != endpoint.name:
                self._remove(address)  # another pod with the same address
                state = None
            if state is None:
                self.by_address[address] = EndpointState(endpoint)
            else:
                state.listed = endpoint
        self.generation += 1

    def _remove(self, address: str) -> None:
        state = self.by_address.pop(address)
        self._count(state.load, None)
        for sent in list(state.sent):
            self.ended(sent)
        self.history.forget(address)

    # -- pages -------------------------------------------------------------------------------------------------------

    def scraped(self, address: str, load: EngineLoad | None, digest: bytes, began_at: float) -> None:
        """Note a page.

        Args:
            address: address of the endpoint; one that is no longer listed is ignored.
            load: the content; `None` if the page has no metrics of a model server.
            digest: hash of the page.
            began_at: time at which it was asked for.
        """
        state = self.by_address.get(address)
        if state is None:
            return
        if load is None:
            self.failed(address, "the page has no metrics of a known model server")
            return
        before, state.load = state.load, load
        if digest != state.page_digest:
            state.page_digest, state.changed_at = digest, began_at
        state.scraped_at, state.failure = began_at, ""
        state.unconfirmed = [sent_at for sent_at in state.unconfirmed if sent_at >= began_at]
        if before is None or _restarted(before, load):
            state.incarnation += 1
            if before is not None:
                self.history.forget(address)
            block = load.block_tokens or _DEFAULT_BLOCK_TOKENS
            self.history.limit(address, load.num_blocks * block * BYTES_PER_TOKEN // CHUNK_BYTES)
        else:
            self._learn(state, before, load)
        self._count(before, load)

    def _count(self, before: EngineLoad | None, after: EngineLoad | None) -> None:
        """Replace the load of one endpoint in the sum over all."""
        for load, sign in ((before, -1), (after, 1)):
            if load is not None:
                self._total_load += sign * (load.running + load.waiting)
                self._num_known += sign

    def failed(self, address: str, why: str) -> None:
        """Note a failed scrape; the last page stays until it is too old."""
        state = self.by_address.get(address)
        if state is not None:
            state.failure = why
            now = self._clock.monotonic()
            state.unconfirmed = [at for at in state.unconfirmed if now - at < self._fresh_seconds]

    def _learn(self, state: EndpointState, before: EngineLoad, load: EngineLoad) -> None:
        """Add the durations between two pages to the estimates."""
        process = Process(WorkerId(state.listed.name), str(state.incarnation))
        prompts, output = _between(before.prefill, load.prefill), _between(before.output, load.output)
        tokens = _rise(before.prompt_tokens, load.prompt_tokens) - _rise(before.cached_tokens, load.cached_tokens)
        if (
            prompts.count >= 1
            and 0 < tokens <= prompts.count * _MAX_MEAN
            and prompts.total <= prompts.count * _MAX_MEAN
        ):
            self.estimates.observe_prefill(process, round(tokens / prompts.count), prompts.total / prompts.count)
        steps = _between(before.steps, load.steps)
        if steps.count >= 1 and steps.total <= steps.count * _MAX_MEAN:
            self.estimates.observe_output(process, load.running, round(steps.count), steps.total)
        if output.count >= 1 and output.total <= output.count * _MAX_MEAN:
            self.estimates.observe_length(round(output.total / output.count))

    # -- requests ----------------------------------------------------------------------------------------------------

    def send(self, address: str, prefill_address: str, num_tokens: int, num_cached: int) -> SentRequest:
        """Count a request until `ended`.

        Args:
            address: endpoint that answers.
            prefill_address: endpoint that computes the prompt; empty if the same does.
            num_tokens: estimated number of prompt tokens.
            num_cached: how many of them are expected to be cached.
        """
        self._mean_prompt += 0.02 * (num_tokens - self._mean_prompt)
        self.estimates.observe_prompt(num_tokens, num_cached)
        commitment = Commitment(prefill_address or address, max(1, num_tokens - num_cached))
        self.commitments.add(commitment)
        sent = SentRequest(address, prefill_address, self._clock.monotonic(), commitment)
        for place in self._places(sent):
            place.sent[sent] = None
        return sent

    def answered(self, sent: SentRequest) -> None:
        """Note that the response has begun: the prompt is computed."""
        if sent.commitment is not None:
            self.commitments.release(sent.commitment)
            sent.commitment = None
            prefill = self.by_address.get(sent.prefill_address)
            if prefill is not None:
                prefill.sent.pop(sent, None)

    def ended(self, sent: SentRequest, *, is_known: bool = True) -> None:
        """Stop counting a request. Idempotent.

        Args:
            sent: the request.
            is_known: whether its response has ended; otherwise it counts until the next page.
        """
        if not sent.is_open:
            return
        sent.is_open = False
        self.answered(sent)
        for state in self._places(sent):
            if state.sent.pop(sent, True) is None and not is_known:
                state.unconfirmed.append(self._clock.monotonic())

    def _places(self, sent: SentRequest) -> Iterator[EndpointState]:
        for address in filter(None, (sent.address, sent.prefill_address)):
            if (state := self.by_address.get(address)) is not None:
                yield state

    # -- views -------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Number of running requests of this picker."""
        return sum(len(state.sent) for state in self.by_address.values())

    def trust(self, state: EndpointState) -> Trust:
        """Return how far an endpoint's page is believed now."""
        now = self._clock.monotonic()
        age = now - state.scraped_at
        if state.load is None or age > self._stale_seconds:
            return Trust.LOST
        is_busy = state.load.running + state.load.waiting > 0
        if age > self._fresh_seconds or (is_busy and now - state.changed_at > FROZEN_SECONDS):
            return Trust.STALE
        return Trust.FRESH

    def load_of(self, state: EndpointState, trust: Trust) -> int:
        """Return the number of requests that an endpoint is assumed to have."""
        own = len(state.sent)
        if state.load is None or trust is Trust.LOST:
            return own + len(state.unconfirmed)
        reported = state.load.running + state.load.waiting + state.since()
        if trust is not Trust.FRESH:
            reported = max(reported, math.ceil(self._total_load / max(1, self._num_known)))
        return max(own, reported)

    def replica(self, state: EndpointState, trust: Trust) -> Replica:
        """Return an endpoint as a candidate for the gateway's policies."""
        listed, load = state.listed, state.load
        block = (load.block_tokens if load else 0) or _DEFAULT_BLOCK_TOKENS
        total = load.num_blocks if load else 0
        usage = (load.usage or 0.0) if load else 0.0
        used = min(total, round(total * usage))
        return Replica(
            address=listed.address,
            worker_id=WorkerId(listed.name),
            fingerprint=b"",
            load=self.load_of(state, trust),
            block_tokens=block,
            tokens_to_compute=round((load.waiting if load else 0) * self._mean_prompt),
            reported_at=state.scraped_at if load else 0.0,
            blocks_total=total,
            blocks_free=total - used,
            blocks_cached=used,
            place=listed.place,
        )


def _restarted(before: EngineLoad, after: EngineLoad) -> bool:
    """Return whether a counter went back, which only a new process does."""
    pairs = ((before.prompt_tokens, after.prompt_tokens), (before.cached_tokens, after.cached_tokens))
    return any(old is not None and new is not None and new < old for old, new in pairs)


def _rise(before: float | None, after: float | None) -> float:
    return max(0.0, after - before) if before is not None and after is not None else 0.0


def _between(before: SumCount | None, after: SumCount | None) -> SumCount:
    if before is None or after is None or after.count < before.count:
        return SumCount()
    return SumCount(max(0.0, after.total - before.total), after.count - before.count)
