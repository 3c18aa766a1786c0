"""Chooses the workers for a sample's next attempt from the current state of the fleet.

Work that is dispatched to the workers is recorded with its durations: the inputs of routing by estimated latency.
"""

import asyncio
import functools
import math
from collections.abc import Sequence

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.seen_blocks import SeenBlocks
from kvferry.gateway.decide.config import RoutingConfig
from kvferry.gateway.decide.estimates.estimates import Commitment, Commitments, Estimates, Process
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.cached_prefix import PromptCaches, PromptNames, routing_key
from kvferry.gateway.decide.routing.policies import RoutingPolicies
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.route_notes import RouteNote, route_notes
from kvferry.gateway.decide.routing.routes import (
    CachedTokens,
    Candidates,
    Layout,
    Pick,
    Replica,
    Route,
    RouteRequest,
    RoutingPolicy,
    SampleProgress,
    choose_pooling,
    choose_route,
    nothing_cached,
    with_adapter,
)
from kvferry.gateway.dispatch.lost_call import WorkerLost
from kvferry.gateway.dispatch.releases import TicketDrop
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.member import WorkerView
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.v1 import decode_pb2

RETRY_AFTER_SECONDS = 1.0
_MAX_ROUTES = 16
_ANY = PrefixHash(load_factor=1.0)
"""Policy used when only the existence of a route matters."""


class WorkRecords:
    """Dispatched work and observed durations of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, estimates: Estimates, commitments: Commitments) -> None:
        self._fleet = fleet
        self._estimates = estimates
        self._commitments = commitments

    # -- dispatched work ---------------------------------------------------------------------------------------------

    def dispatched(self, run: SampleRun, route: Route) -> None:
        """Count the sample's work on the workers of its route, replacing an earlier route.

        Args:
            run: the sample, whose commitment is set.
            route: its route.
        """
        self.arrived(run)
        computing = route.prefill or (route.decode if run.ticket is None else None)
        decode = route.decode.replica
        new_tokens = len(run.token_ids) - route.decode.cached.tokens
        if run.pooling is None:
            new_tokens += math.ceil(self._estimates.output_tokens(run.max_new_tokens))
        run.commitment = Commitment(
            prompt_address="" if computing is None else computing.replica.address,
            prompt_tokens=0 if computing is None else max(1, len(run.token_ids) - computing.cached.tokens),
            decode_address="" if run.pooling is not None else decode.address,
            decode_blocks=-(-new_tokens // decode.block_tokens),
        )
        self._commitments.add(run.commitment)

    def arrived(self, run: SampleRun) -> None:
        """Stop counting the sample's work: it is in its worker's status, or the sample has ended. Idempotent."""
        if run.commitment is not None:
            self._commitments.release(run.commitment)
            run.commitment = None

    # -- durations ---------------------------------------------------------------------------------------------------

    def prefilled(self, run: SampleRun, address: str, num_cached: int, seconds: float) -> None:
        """Record the computation of a prompt, or of the tokens so far.

        Args:
            run: the sample.
            address: address of the worker that computed it.
            num_cached: number of tokens whose KV was cached.
            seconds: time of the computation in seconds.
        """
        num_tokens = len(run.token_ids)
        if not run.is_step:  # nearly all tokens of a step are cached, unlike those of clients' prompts
            self._estimates.observe_prompt(num_tokens, num_cached)
        process = _process(self._fleet.view(address))
        if process is not None:
            self._estimates.observe_prefill(process, num_tokens - num_cached, seconds)

    def handed_off(self, run: SampleRun, source: str, target: str, handoff: decode_pb2.Handoff) -> None:
        """Record the duration of a hand-off.

        Args:
            run: the sample.
            source: address of the prefill worker.
            target: address of the decode worker.
            handoff: the decode worker's report.
        """
        views = self._fleet.view(source), self._fleet.view(target)
        processes = _process(views[0]), _process(views[1])
        if views[0] is None or views[1] is None or processes[0] is None or processes[1] is None:
            return
        num_tokens = handoff.num_blocks * views[1].block_tokens
        distance = views[0].place.distance(views[1].place)
        self._estimates.observe_transfer(processes[0], processes[1], distance, num_tokens, handoff.seconds)

    def generated(self, run: SampleRun, address: str, running: int, num_tokens: int, seconds: float) -> None:
        """Record a finished output.

        Args:
            run: the sample.
            address: address of the worker.
            running: number of requests on the worker when the output began.
            num_tokens: number of tokens after the first one on this worker.
            seconds: time between the first and the last token on this worker.
        """
        if not run.is_step:
            self._estimates.observe_length(len(run.emitted))
        view = self._fleet.view(address)
        process = _process(view)
        if view is not None and process is not None:
            mean = (running + self.running(address)) / 2
            self._estimates.observe_output(process, mean, num_tokens, seconds)

    def running(self, address: str) -> int:
        """Return the number of requests on a worker."""
        view = self._fleet.view(address)
        return 0 if view is None else view.as_replica().load


def _process(view: WorkerView | None) -> Process | None:
    if view is None or view.worker_id is None or view.incarnation is None:
        return None
    return Process(view.worker_id, view.incarnation)


class RouteSelection:
    """Chooses routes for the samples of one gateway. Used on the event loop's thread only."""

    def __init__(
        self,
        fleet: Fleet,
        config: RoutingConfig,
        namers: BlockNamers,
        cache_map: CacheMap,
        policies: RoutingPolicies,
        records: WorkRecords,
        instruments: GatewayInstruments,
    ) -> None:
        """
        Args:
            fleet: the workers.
            config: settings of routing.
            namers: block namers by tenant, for the names of prompts' blocks.
            cache_map: predicts the blocks that each worker has cached.
            policies: the routing policies.
            records: counts the work that is dispatched to each worker.
            instruments: metrics of routing decisions.
        """
        self._fleet = fleet
        self._map = cache_map
        self._config = config
        self._namers = namers
        self._policies = policies
        self._records = records
        self._instruments = instruments
        self.seen = SeenBlocks()
        """The blocks of earlier prompts."""

    def select(self, run: SampleRun, drop_ticket: TicketDrop) -> Route:
        """Choose the route of the next attempt.

        Workers that failed this sample are used only if no other route exists; the ticket is dropped if no decode
        worker can read it.

        Args:
            run: the sample.
            drop_ticket: called if no decode worker can read the sample's ticket.

        Raises:
            Overloaded: every worker is at capacity, and no tokens have been generated yet.
            WorkerLost: no workers accept requests.
        """
        self._records.arrived(run)  # its earlier choice does not count as load on the workers
        caches = PromptCaches(
            self._map, self._namers, run.names, run.request.caller.scope, run.token_ids, self._config.prefix_blocks
        )
        route = self._choose(run, frozenset(run.excluded), caches)
        if route is None and isinstance(run.last_error, Overloaded) and not run.emitted:
            raise run.last_error
        if route is None and run.excluded:
            route = self._choose(run, frozenset(), caches)
        if route is None and run.ticket is not None:
            drop_ticket(run, "no_reader")
            route = self._choose(run, frozenset(), caches)
        if route is None:
            raise WorkerLost(
                Unavailable(
                    "no workers accept requests; see /ready for the reasons", retry_after_seconds=RETRY_AFTER_SECONDS
                ),
                None,
            )
        spilled = route.decode.spilled or (route.prefill is not None and route.prefill.spilled)
        if run.ticket is None:  # if there is a ticket, this decision was counted before prefill
            self._instruments.routes.labels(route.reason.value, str(spilled).lower()).inc()
        self._records.dispatched(run, route)
        for chosen in (route.prefill, route.decode):
            if chosen is not None:
                caches.chose(chosen)
        if run.ticket is None and not run.emitted:
            # After the request was sent to the worker, which needs longer than this.
            is_new = not run.routes and not run.is_step  # else the prompt was counted before
            note = functools.partial(self._note_blocks, run, route.prefill or route.decode, caches, is_new=is_new)
            asyncio.get_running_loop().call_soon(note)
        notes = route_notes(route, self._config.policy)
        run.routes = [*run.routes, *notes][-_MAX_ROUTES:]
        if run.request.caller.is_explained and run.ticket is None:  # with a ticket, the pair was compared before
            # Runs after the call to the worker is sent, so that the comparison does not delay the request.
            asyncio.get_running_loop().call_soon(self._compare, run, route, notes[0], caches)
        return route

    def _note_blocks(self, run: SampleRun, computing: Pick, caches: PromptCaches, *, is_new: bool) -> None:
        """Record which of the prompt's blocks other workers have, and which ones were in earlier prompts."""
        run.num_elsewhere = caches.elsewhere(computing)
        if is_new:
            num_seen, num_named = caches.note_seen(computing, self.seen)
            self._instruments.prompt_routed(
                len(run.token_ids), num_named=num_named, num_seen=num_seen, is_exact=self.seen.is_exact
            )

    def _compare(self, run: SampleRun, route: Route, note: RouteNote, caches: PromptCaches) -> None:
        """Add the choices of the other policies to a note."""
        candidates = self._candidates(run, frozenset(run.excluded))
        request = self._request(run, candidates, caches)
        others = self._policies.others(request, lambda policy: self._route(run, request, candidates, policy))
        compared = route_notes(route, self._config.policy, others)[0]
        run.routes = [compared if one is note else one for one in run.routes]

    def exists(self, run: SampleRun) -> bool:
        """Return whether any route for the sample exists now, including workers that failed it."""
        return self._choose(run, frozenset()) is not None

    def exists_elsewhere(self, run: SampleRun) -> bool:
        """Return whether a route exists that uses only workers that have not failed this sample since its last
        token."""
        return self._choose(run, frozenset(run.excluded)) is not None

    def uncached_tokens(self, scope: str, token_ids: Sequence[int]) -> int:
        """Return the number of tokens of a prompt, at least 1, that would be computed on the worker that has cached
        most of it.

        Args:
            scope: scope of the request's block names (`core.hashing.cache_scope`).
            token_ids: tokens of the prompt.
        """
        candidates = self._fleet.candidates()
        caches = PromptCaches(self._map, self._namers, PromptNames(), scope, token_ids, self._config.prefix_blocks)
        computing = (*candidates.prefill, *candidates.both) or candidates.decode
        return len(token_ids) - max((caches(replica).tokens for replica in computing), default=0)

    def _choose(
        self,
        run: SampleRun,
        excluded: frozenset[str],
        cached: CachedTokens | None = None,
    ) -> Route | None:
        """Choose a route by the configured policy. Without cache predictions, the result shows only whether a route
        exists."""
        candidates = self._candidates(run, excluded)
        request = self._request(run, candidates, nothing_cached if cached is None else cached)
        return self._route(run, request, candidates, _ANY if cached is None else self._policies.chosen)

    def _candidates(self, run: SampleRun, excluded: frozenset[str] = frozenset()) -> Candidates:
        return with_adapter(self._fleet.candidates(excluded), run.request.caller.adapter)

    def _request(self, run: SampleRun, candidates: Candidates, cached: CachedTokens) -> RouteRequest:
        request = run.request
        key = routing_key(
            self._namers,
            request.caller.scope,
            request.token_ids,
            self._config.prefix_blocks,
            request.caller.hints.affinity_key,
        )
        return RouteRequest(key, cached, len(run.token_ids), run.max_new_tokens, _source(run, candidates))

    def _route(
        self, run: SampleRun, request: RouteRequest, candidates: Candidates, policy: RoutingPolicy
    ) -> Route | None:
        if run.pooling is not None:
            return choose_pooling(request, candidates, policy)
        ticket = run.ticket
        offered = None if ticket is None else Layout(ticket.fingerprint, ticket.family)
        progress = SampleProgress(len(run.request.token_ids), bool(run.emitted), offered)
        skip_below = self._config.skip_prefill_below_tokens
        return choose_route(request, candidates, policy, progress, skip_prefill_below=skip_below)


def _source(run: SampleRun, candidates: Candidates) -> Replica | None:
    """Return the worker that offers the prompt's KV; `None` if the prompt is not computed yet."""
    ticket = run.ticket
    if ticket is None:
        return None
    known = (replica for replica in candidates.prefill if replica.address == ticket.address)
    return next(known, Replica(ticket.address, WorkerId(ticket.address), ticket.fingerprint, 0, ticket.family))
