"""The gateway in virtual time: production flow control, cache map and routing, for one pool.

arrive --> FlowController --> route --> prefill replica --> offer --> decode replica --> finished
                ^                                                                           |
                +------------------------- room of the fleet, tokens used ------------------+
"""

from array import array
from collections.abc import Collection
from functools import partial

from kvferry.core.errors import InvariantBroken, Overloaded
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.estimates.estimates import Commitments, Estimates
from kvferry.gateway.decide.flow.capacity import Room, room
from kvferry.gateway.decide.flow.controller import FlowController, QueueBounds
from kvferry.gateway.decide.flow.fair_queue import QueueEntry
from kvferry.gateway.decide.routing.cached_prefix import MAX_BLOCKS, PromptCaches, PromptNames, prefix_key
from kvferry.gateway.decide.routing.policies import make_policy
from kvferry.gateway.decide.routing.routes import (
    Layout,
    Route,
    RouteRequest,
    RoutingPolicy,
    SampleProgress,
    choose_route,
)
from kvferry.kv.interface.ticket import Ticket
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.fleet.measures import Measures
from kvferry.simulator.fleet.members import Members, SimulatedMember
from kvferry.simulator.fleet.records import Records
from kvferry.simulator.fleet.runs import GatewaySettings, RequestRun, p99, run_of
from kvferry.simulator.requests.demand import SimRequest
from kvferry.simulator.worker.handoff import remote_of
from kvferry.simulator.worker.jobs import Job

_TOKEN_BYTES = 8
_MAX_QUEUED_BYTES = 1 << 31
"""Maximum size in bytes of the prompts in the queue; further requests are refused, as by a gateway."""


class SimulatedGateway:
    """One gateway and its pool. Implements `simulator.worker.jobs.Listener`."""

    def __init__(
        self, clock: VirtualClock, settings: GatewaySettings, namers: BlockNamers, policy: RoutingPolicy | None = None
    ) -> None:
        """
        Args:
            clock: clock of the simulation.
            settings: settings of the gateway.
            namers: factory of block namers, keyed like the workers'.
            policy: the routing policy; `None` uses the one in `settings`.
        """
        self._clock, self.settings, self._namers = clock, settings, namers
        estimates, commitments, routing = Estimates(), Commitments(clock), settings.routing
        self.policy = policy or make_policy(
            routing.policy, estimates, commitments, load_factor=routing.load_factor, seed=settings.seed
        )
        self._records = Records(estimates, commitments)
        self.cache_map = CacheMap(clock)
        self.members = Members()
        self.measures = Measures()
        self._bounds = QueueBounds(settings.max_queued, _MAX_QUEUED_BYTES)
        self.controller = FlowController(self._bounds, settings.class_weights)
        self._room: Room | None = None
        self._runs: dict[QueueEntry, RequestRun] = {}
        self._is_polling = False
        self._collects_gaps = "itl" in settings.slo

    # ------------------------------------------------------------------ workers

    def join(self, member: SimulatedMember) -> None:
        """Add a worker that accepts requests."""
        self.members.join(member)
        self._room = None
        self._pump()

    def lose(self, member: SimulatedMember, lost: list[Job]) -> None:
        """Remove a worker that has stopped; its requests continue on others, from the tokens that were streamed.

        Args:
            member: the worker.
            lost: its unfinished jobs.
        """
        self.members.leave(member)
        self.cache_map.leave(member.name)
        for _ in self.cache_map.sweep():
            pass
        self._room = None
        for job in lost:
            run = run_of(job)
            run.excluded = frozenset({member.name})
            run.attempt += 1
            self.measures.resumed += 1
            run.last = job.last
            self._dismiss(run)
            if job.sequence is not None and job.sequence.sampling.num_generated:
                run.tokens = list(job.sequence.sampling.tokens)
            self._send(run, ticket=None)

    # ------------------------------------------------------------------ requests

    @property
    def num_open(self) -> int:
        """Number of requests that are queued or running."""
        return len(self._runs)

    @property
    def runs(self) -> Collection[RequestRun]:
        """Requests that are queued or running."""
        return self._runs.values()

    def arrive(self, request: SimRequest) -> None:
        """Accept or refuse a request."""
        measures = self.measures
        measures.arrived += 1
        num_prompt = len(request.prompt)
        entry = QueueEntry(
            tenant=request.tenant,
            priority=request.priority,
            cost=float(num_prompt + request.output.count),
            prefill_tokens=num_prompt,
            num_bytes=_TOKEN_BYTES * num_prompt,
            weight=self.settings.weights.get(request.tenant, 1.0),
        )
        try:
            victims = self.controller.make_room(entry, self._bounds, self._clock.now)
        except Overloaded:
            measures.refused += 1
            return
        for victim in victims:
            measures.refused += 1
            del self._runs[victim]
        gaps = array("d") if self._collects_gaps else None
        self._runs[entry] = RequestRun(request, entry, PromptNames(), gaps=gaps)
        self.controller.submit(entry, self._clock.now)
        if not self._is_polling:
            self._is_polling = True
            self._poll()
        self._pump()

    def _poll(self) -> None:
        """Record the statuses of all workers for routing."""
        for member in self.members:
            if self.settings.exact_status:
                member.replica.catch_up()
            self.members.reported(member, self._clock.now)
        self._room = None
        self._is_polling = bool(self._runs)
        if self._is_polling:
            self._clock.after(self.settings.status_seconds, self._poll)
            self._pump()

    def _pump(self) -> None:
        """Dispatch queued requests for which the fleet has room."""
        if not self.controller.num_queued or not len(self.members):
            return
        if self._room is None:
            self._room = room((member.room for member in self.members), self.settings.max_streams)
        for entry in self.controller.dispatch(self._room, self._clock.now):
            run = self._runs[entry]
            self.measures.queue.add(self._clock.now - run.request.at)
            self._send(run, ticket=None)

    # ------------------------------------------------------------------ routing

    def _send(self, run: RequestRun, ticket: Ticket | None) -> None:
        """Choose workers for a request and send it."""
        self._arrived(run)  # its earlier choice does not count as load on the workers
        route, caches = self._route(run, ticket)
        if route is None:
            self._clock.after(self.settings.status_seconds, partial(self._send, run, ticket))
            return
        target = route.decode if route.prefill is None else route.prefill
        run.decode = self.members.by_name[route.decode.replica.address]
        member = self.members.by_name[target.replica.address]
        run.commitment = self._records.dispatched(
            run.tokens or run.request.prompt, run.request.output.count, route, has_kv=ticket is not None
        )
        for pick in (route.prefill, route.decode):
            if pick is not None:
                caches.chose(pick)
        self._submit(run, member, exports=route.prefill is not None, ticket=ticket)

    def _route(self, run: RequestRun, ticket: Ticket | None) -> tuple[Route | None, PromptCaches]:
        config, tokens = self.settings.routing, run.tokens or run.request.prompt
        candidates = self.members.candidates(run.excluded)
        source = None if ticket is None or run.source is None else run.source.candidate
        offered = None if source is None else Layout(source.fingerprint, source.family)
        progress = SampleProgress(len(tokens), run.tokens is not None, offered)
        tenant = run.request.tenant
        caches = PromptCaches(self.cache_map, self._namers, run.names, tenant, tokens, config.prefix_blocks)
        request = RouteRequest(
            prefix_key(self._namers, tenant, tokens, config.prefix_blocks),
            caches,
            len(tokens),
            run.request.output.count,
            source,
        )
        skip_below = config.skip_prefill_below_tokens
        return choose_route(request, candidates, self.policy, progress, skip_prefill_below=skip_below), caches

    def _arrived(self, run: RequestRun) -> None:
        self._records.arrived(run.commitment)
        run.commitment = None

    def _submit(self, run: RequestRun, member: SimulatedMember, *, exports: bool, ticket: Ticket | None) -> None:
        request = run.request
        run.member = member
        member.in_flight += 1
        self.members.load_changed(member)
        tokens = run.tokens or request.prompt
        job = Job(
            request_id=RequestId(f"{request.index}/{run.attempt}"),
            tokens=tokens,
            num_prompt=len(request.prompt),
            output=request.output,
            arrived=request.at,
            names=run.names.of(self._namers, request.tenant, member.candidate, tokens, MAX_BLOCKS),
            tenant=request.tenant,
            priority=request.priority,
            retain_seconds=request.retain_seconds,
            exports=exports,
            remote=None if ticket is None else remote_of(ticket, run.attempt),
            last=run.last,
            gaps=run.gaps,
            context=run,
        )
        self._clock.after(self.settings.latency, partial(self._deliver, member, job))

    def _deliver(self, member: SimulatedMember, job: Job) -> None:
        if member.replica.is_stopped:  # the worker was lost meanwhile
            run = run_of(job)
            run.attempt += 1
            self.measures.resumed += 1
            self._send(run, ticket=None)
        else:
            member.replica.submit(job)

    # ------------------------------------------------------------------ reports of replicas

    def first_token(self, job: Job, now: float) -> None:
        """Note the first token of a request."""
        run = run_of(job)
        run.first = now
        seconds = now + self.settings.latency - job.arrived
        self.measures.ttft.add(seconds)
        self.measures.of_tenant(job.tenant).ttft.add(seconds)
        self._clock.after(self.settings.latency, partial(self._prefilled, run))

    def _prefilled(self, run: RequestRun) -> None:
        if run.entry in self._runs:
            self.controller.prefilled(run.entry)
            self._pump()

    def answered(self, job: Job, now: float) -> None:
        """Record the first token of a job on its worker."""
        run = run_of(job)
        if run.member is not None:
            if job.remote is None:
                self._records.prefilled(job, run.member, now)
            run.running = run.member.candidate.load
        if not job.exports:
            self._arrived(run)

    def fetched(self, job: Job, num_blocks: int, seconds: float) -> None:
        """Note a hand-off."""
        run = run_of(job)
        if run.source is not None and run.member is not None:
            self._records.handed_off(run.source, run.member, num_blocks, seconds)

    def gap(self, seconds: float, weight: int) -> None:
        """Note the time between two tokens."""
        self.measures.itl.add(seconds, weight)

    def exported(self, job: Job, export: Export, now: float) -> None:
        """Offer the pages of a prompt, and send the request to its decode worker.

        Raises:
            InvariantBroken: the job has no sequence yet, or was not sent by a gateway.
        """
        run = run_of(job)
        member = self._leave(run)
        sequence = job.sequence
        if sequence is None:
            raise InvariantBroken("a job exported pages before it was added")
        ticket = member.desk.offer(export, export.num_tokens)
        run.tokens, run.last = list(sequence.sampling.tokens), job.last
        run.offer, run.source = (member.desk, ticket.id), member
        self._clock.after(self.settings.latency, partial(self._hand_off, run, ticket))

    def _hand_off(self, run: RequestRun, ticket: Ticket) -> None:
        run.attempt += 1
        decode = run.decode
        if decode is None or decode.replica.is_stopped:
            self._send(run, ticket)
        else:
            self._submit(run, decode, exports=False, ticket=ticket)

    def declined(self, job: Job) -> None:
        """End the offer of pages that are computed again."""
        self._dismiss(run_of(job))

    def _dismiss(self, run: RequestRun) -> None:
        if run.offer is not None:
            desk, ticket_id = run.offer
            run.offer = None
            if ticket_id in desk.book:
                self._clock.after(self.settings.latency, partial(desk.release, ticket_id))

    def finished(self, job: Job, now: float) -> None:
        """Note the end of a request."""
        run = run_of(job)
        self._records.generated(job, self._leave(run), run.running, run.request.output.count)
        self._arrived(run)
        self._dismiss(run)
        self._clock.at(now + self.settings.latency, partial(self._finish, run, job, now))

    def _leave(self, run: RequestRun) -> SimulatedMember:
        member = run.member
        if member is None:
            raise InvariantBroken("a request without a worker ended")
        member.in_flight -= 1
        self.members.load_changed(member)
        return member

    def _finish(self, run: RequestRun, job: Job, now: float) -> None:
        measures, request = self.measures, run.request
        count, end = request.output.count, now + self.settings.latency
        seconds = end - request.at
        measures.completed += 1
        measures.input_tokens += len(request.prompt)
        measures.output_tokens += count
        measures.e2e.add(seconds)
        measures.of_tenant(request.tenant).e2e.add(seconds)
        measures.normalized += seconds / count
        measures.ended_at = max(measures.ended_at, end)
        measures.good += self._is_good(run, job, seconds, now)
        self.controller.finish(run.entry, float(len(request.prompt) + count))
        del self._runs[run.entry]
        self._pump()

    def _is_good(self, run: RequestRun, job: Job, seconds: float, now: float) -> bool:
        slo = self.settings.slo
        if not slo:
            return True
        first = now if run.first is None else run.first
        count = run.request.output.count
        measured = {
            "ttft": first + self.settings.latency - run.request.at,
            "tpot": (now - first) / (count - 1) if count > 1 else 0.0,
            "itl": p99(job.gaps),
            "e2el": seconds,
        }
        return all(measured[name] <= limit for name, limit in slo.items())
