"""Chooses the endpoint of a request, and the endpoint that computes its prompt, by the gateway's routing policies.
No I/O.

A pool is listed in groups, by role and by trust in the loads, at most every `GROUP_SECONDS`. Of a group, the shortlist
is compared by the policy (`gateway.decide.routing`), by default in estimated seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from kvferry.core.clock import Clock
from kvferry.gateway.decide.config import PolicyName
from kvferry.gateway.decide.routing.policies import make_policy
from kvferry.gateway.decide.routing.routes import (
    Candidates,
    PredictedPrefix,
    Replica,
    Route,
    RouteRequest,
    SampleProgress,
    choose_route,
)
from kvferry.picker.decide.endpoints import EndpointStates, SentRequest, Trust
from kvferry.picker.decide.exchange import PickedRoute, Refusal
from kvferry.picker.decide.headers import matches
from kvferry.picker.decide.prompt_body import (
    BYTES_PER_TOKEN,
    CHUNK_BYTES,
    PromptBody,
    affinity_key,
    chunk_names,
)
from kvferry.picker.decide.shortlist import Eligible, HashRing, shortlist

GROUP_SECONDS = 0.05
_CHUNK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
_MIN_CHUNKS = 2
"""Cached chunks from which they decide among endpoints with nearly equal estimates."""


@dataclass(frozen=True, slots=True)
class ChoiceConfig:
    """Settings of the choice."""

    policy: PolicyName = "latency"
    prefix_chunks: int = 4
    """Leading chunks by which prompts meet on an endpoint; see `gateway.decide.config.RoutingConfig.prefix_blocks`."""
    load_factor: float = 1.25
    skip_prefill_below_tokens: int = 0
    """Prompts with fewer estimated tokens to compute use no prefill endpoint."""
    fallbacks: int = 0
    """Endpoints that the proxy may try after the chosen one. Not all proxies accept a list."""


@dataclass(frozen=True, slots=True)
class PickRequest:
    """A request for which an endpoint is chosen."""

    prompt: PromptBody
    subset: tuple[str, ...] | None = None
    """Entries of the subset of which one must be chosen; `None` for all endpoints."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A chosen endpoint, which `SentRequest` counts until the request ends."""

    route: PickedRoute
    sent: SentRequest
    names: tuple[int, ...]
    """The prompt's chunks."""
    num_cached: int
    """Of these, the ones that the endpoint is assumed to have."""
    trust: Trust


@dataclass(slots=True)
class _Groups:
    answering: Mapping[Trust, Eligible] = field(default_factory=dict)
    prefill: Mapping[Trust, Eligible] = field(default_factory=dict)
    adapters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ring: HashRing = field(default_factory=lambda: HashRing({}))
    generation: int = -1
    made_at: float = 0.0


class EndpointChoice:
    """Chooses endpoints of one pool. Not thread-safe."""

    def __init__(self, states: EndpointStates, config: ChoiceConfig, clock: Clock, draws: Random) -> None:
        """
        Args:
            states: the endpoints.
            config: settings.
            clock: clock of the groups.
            draws: random numbers of the shortlist.
        """
        self._states = states
        self._config = config
        self._clock = clock
        self._draws = draws
        self._groups = _Groups()
        self._policy = make_policy(config.policy, states.estimates, states.commitments, load_factor=config.load_factor)

    def pick(self, request: PickRequest) -> Picked | Refusal:
        """Choose the endpoint of a request and count the request there."""
        groups = self._current()
        found = self._among(groups.answering, request.subset)
        if found is None:
            return _none_ready(request, len(self._states.by_address))
        trust, eligible = found
        prompt = request.prompt
        names = chunk_names(prompt)
        cached = self._states.history.cached(names)
        key = affinity_key(prompt, names, self._config.prefix_chunks)
        eligible = _with_adapter(eligible, groups.adapters.get(prompt.model))
        weights = shortlist(eligible, cached, key, groups.ring, self._draws)
        answering, computing = self._replicas(weights, trust), list[Replica]()
        if (others := self._among(groups.prefill, request.subset)) is not None:
            more = shortlist(others[1], cached, key, groups.ring, self._draws)
            computing = self._replicas(more, others[0])
            weights |= more
        route = self._route(request, answering, computing, cached, weights, len(names))
        return self._send(route, prompt, tuple(names), cached, trust)

    def served(self, picked: Picked, address: str) -> bool:
        """Note which endpoint served a request; return whether it is a fallback. Its cache has the prompt now."""
        if not address or address == picked.sent.address or address not in self._states.by_address:
            return False
        self._states.history.sent(address, picked.names)
        return True

    def is_saturated(self, subset: tuple[str, ...] | None, *, max_waiting: int, max_usage: float) -> bool:
        """Return whether each endpoint that may answer has more waiting requests or a fuller KV memory than the bounds.

        An endpoint without a fresh page does not count, unless all lack one: then the pool is not saturated, since
        nothing says so.
        """
        found = self._current().answering.get(Trust.FRESH)
        if found is None:
            return False
        states = self._states.by_address
        checked = False
        for address in found.order:
            state = states.get(address)
            if state is None or state.load is None or (subset is not None and not matches(address, subset)):
                continue
            checked = True
            full = state.load.usage is not None and state.load.usage >= max_usage
            if not full and state.waiting() < max_waiting:
                return False
        return checked

    # -- groups ------------------------------------------------------------------------------------------------------

    def _current(self) -> _Groups:
        now, groups = self._clock.monotonic(), self._groups
        if groups.generation == self._states.generation and now - groups.made_at < GROUP_SECONDS:
            return groups
        answering: dict[Trust, list[str]] = {trust: [] for trust in Trust}
        prefill: dict[Trust, list[str]] = {trust: [] for trust in Trust}
        adapters: dict[str, set[str]] = {}
        for address, state in self._states.by_address.items():
            if state.listed.is_stopping:
                continue
            (prefill if state.listed.is_prefill else answering)[self._states.trust(state)].append(address)
            for adapter in state.load.adapters if state.load else ():
                adapters.setdefault(adapter, set()).add(address)
        if groups.generation != self._states.generation:
            listed = self._states.by_address.items()
            groups.ring = HashRing({state.listed.name: address for address, state in listed})
        groups.answering = _usable(answering)
        groups.prefill = _usable(prefill)
        groups.adapters = {name: frozenset(found) for name, found in adapters.items()}
        groups.generation, groups.made_at = self._states.generation, now
        return groups

    def _among(self, groups: Mapping[Trust, Eligible], subset: tuple[str, ...] | None) -> tuple[Trust, Eligible] | None:
        """Return the most trusted endpoints of a subset; `None` if it has none."""
        wanted = None if subset is None else frozenset(subset)
        for trust in (Trust.FRESH, Trust.LOST):
            group = groups.get(trust)
            if group is None:
                continue
            if wanted is None:
                return trust, group
            chosen = [address for address in group.order if matches(address, wanted)]
            if chosen:
                return trust, Eligible.of(chosen)
        return None

    def _replicas(self, addresses: Iterable[str], trust: Trust) -> list[Replica]:
        states = self._states
        found = [states.by_address[address] for address in addresses if address in states.by_address]
        known = trust if trust is Trust.LOST else None
        return [states.replica(state, known or states.trust(state)) for state in found]

    # -- the choice --------------------------------------------------------------------------------------------------

    def _route(
        self,
        request: PickRequest,
        answering: list[Replica],
        computing: list[Replica],
        cached: Mapping[str, int],
        weights: Mapping[str, bytes],
        num_chunks: int,
    ) -> Route:
        prompt = request.prompt

        def prefix_on(replica: Replica) -> PredictedPrefix:
            depth = cached.get(replica.address, 0)
            return PredictedPrefix(
                tokens=min(depth * _CHUNK_TOKENS, prompt.num_tokens - 1),
                confirmed_tokens=min(depth * _CHUNK_TOKENS, prompt.num_tokens - 1),
                decides=depth >= min(_MIN_CHUNKS, num_chunks) > 0,
            )

        wanted = RouteRequest(
            key=lambda _: b"",
            order=lambda replica: weights[replica.address],
            cached=prefix_on,
            num_tokens=prompt.num_tokens,
            max_output_tokens=prompt.max_output_tokens,
        )
        if computing:
            candidates = Candidates(prefill=tuple(computing), decode=tuple(answering))
        else:
            candidates = Candidates(both=tuple(answering))
        route = choose_route(
            wanted,
            candidates,
            self._policy,
            SampleProgress(prompt.num_tokens),
            skip_prefill_below=self._config.skip_prefill_below_tokens,
        )
        assert route is not None  # at least one endpoint answers
        return route

    def _send(
        self,
        route: Route,
        prompt: PromptBody,
        names: tuple[int, ...],
        cached: Mapping[str, int],
        trust: Trust,
    ) -> Picked:
        address = route.decode.replica.address
        prefill = "" if route.prefill is None else route.prefill.replica.address
        others = [one.replica.address for one in route.decode.ranked if one.replica.address != address]
        depth = cached.get(prefill or address, 0)
        sent = self._states.send(address, prefill, prompt.num_tokens, depth * _CHUNK_TOKENS)
        self._states.history.sent(address, names)
        if prefill:
            self._states.history.sent(prefill, names)
        endpoints = (address, *others[: self._config.fallbacks])
        return Picked(PickedRoute(endpoints, prefill), sent, names, depth, trust)


def _usable(groups: Mapping[Trust, list[str]]) -> dict[Trust, Eligible]:
    """Return the endpoints of which something is known, and, only if there are none, the others."""
    known = [*groups[Trust.FRESH], *groups[Trust.STALE]]
    found = {Trust.FRESH: Eligible.of(known)} if known else {}
    if groups[Trust.LOST]:
        found[Trust.LOST] = Eligible.of(groups[Trust.LOST])
    return found


def _with_adapter(eligible: Eligible, having: frozenset[str] | None) -> Eligible:
    """Return the endpoints on which an adapter is in use, if there are any: another would have to load it first."""
    if not having:
        return eligible
    found = [address for address in eligible.order if address in having]
    return Eligible.of(found) if found else eligible


def _none_ready(request: PickRequest, num_endpoints: int) -> Refusal:
    if request.subset is not None:
        return Refusal(
            503,
            f"none of the {len(request.subset)} endpoints in the subset is ready; the pool has {num_endpoints}",
            "subset_empty",
        )
    return Refusal(503, "the pool has no ready endpoint; check its selector and its pods", "no_endpoints")
