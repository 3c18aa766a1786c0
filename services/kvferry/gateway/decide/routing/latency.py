"""Routing by estimated latency: the wait for earlier prompts, the prompt, the hand-off, the output, and evicted blocks.

All terms are in seconds, so no weights are needed: a cached prefix counts as the computation that it saves, a queue as
the time that it takes. A popular prefix spreads to further replicas as soon as queueing at the replicas that have it
takes longer than computing it elsewhere. A pair of a prefill and a decode worker is chosen together, since the hand-off
depends on both. Replicas whose estimates hardly differ are ordered by cached prefix and rendezvous weight, so that
equal prefixes go to the same replica.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.gateway.decide.estimates.estimates import Commitments, Estimates
from kvferry.gateway.decide.routing.prefix_hash import rank
from kvferry.gateway.decide.routing.routes import (
    MAX_RANKED,
    Candidate,
    Pick,
    Replica,
    Route,
    RouteRequest,
    Terms,
    Work,
    readers,
)

TIE_SHARE = 0.02
TIE_SECONDS = 0.002
"""Estimates within this difference of the best one, or within this share of its time to first token, count as equal to
it."""
_MAX_PAIRED = 8
"""Number of best prefill replicas, and of best decode replicas, whose pairs are all compared."""
_MAX_WAITS = 10.0
"""Upper bound on the wait for KV blocks, in durations of an output; beyond it, the estimate is meaningless."""


class _Pair(NamedTuple):
    seconds: float
    prefill: Candidate
    decode: Candidate


class LatencyPolicy:
    """The policy `latency`. Deterministic for given estimates and commitments."""

    def __init__(self, estimates: Estimates, commitments: Commitments) -> None:
        self._estimates = estimates
        self._commitments = commitments

    def one(self, request: RouteRequest, replicas: Sequence[Replica], work: Work) -> Pick | None:
        """Choose the replica with the lowest estimated latency; see `Policy.one`."""
        if not replicas:
            return None
        ranked = _sorted(self._candidate(request, replica, work) for replica in replicas)
        bound = _bound(_total(ranked[0]), _before_output(ranked[0]))
        equal = [candidate for candidate in ranked if _total(candidate) <= bound]
        chosen = max(equal, key=rank)
        return _pick(chosen, ranked)

    def pair(
        self, request: RouteRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> tuple[Pick, Pick] | None:
        """Choose the pair with the lowest estimated latency; see `Policy.pair`."""
        if not prefill:
            return None
        first = _sorted(self._candidate(request, replica, Work.PROMPT) for replica in prefill)
        second = _sorted(self._candidate(request, replica, Work.GENERATE) for replica in decode)
        readable: dict[tuple[bytes, bytes], set[str]] = {}
        pairs: list[_Pair] = []
        for computing in first[:_MAX_PAIRED]:
            source = computing.replica
            layout = source.fingerprint, source.family
            if layout not in readable:
                readable[layout] = {replica.address for replica in readers(decode, *layout)}
            reading = [candidate for candidate in second if candidate.replica.address in readable[layout]]
            considered = reading[:_MAX_PAIRED]
            if source.place.node:
                near = [one for one in reading[_MAX_PAIRED:] if one.replica.place.node == source.place.node]
                considered += near[:_MAX_PAIRED]
            before = _total(computing)
            pairs += [
                _Pair(before + _total(candidate) + self._handoff(request, source, candidate), computing, candidate)
                for candidate in considered
            ]
        if not pairs:
            return None
        least = min(pairs, key=lambda pair: pair.seconds)
        bound = _bound(least.seconds, least.seconds - _total(least.decode))
        equal = [pair for pair in pairs if pair.seconds <= bound]
        chosen = max((pair.prefill for pair in equal), key=rank)
        # Among decode replicas tied for this prefill replica, pick the one ranked first for the prefix.
        partner = max((pair.decode for pair in equal if pair.prefill is chosen), key=rank)
        partners = sorted((pair for pair in pairs if pair.prefill is chosen), key=lambda pair: pair.seconds)
        moved = {
            pair.decode.replica.address: self._with_transfer(request, chosen.replica, pair.decode) for pair in partners
        }
        return _pick(chosen, first), _pick(moved[partner.replica.address], list(moved.values()))

    def estimate(self, request: RouteRequest, route: Route) -> float:
        """Return the estimated latency of a request on a route of any policy, in seconds.

        Args:
            request: properties of the request.
            route: a route of any policy.
        """
        decode = route.decode.replica
        if route.prefill is None:
            work = Work.WHOLE if request.source is None else Work.GENERATE
            return _total(self._candidate(request, decode, work))
        source = route.prefill.replica
        generating = self._with_transfer(request, source, self._candidate(request, decode, Work.GENERATE))
        return _total(self._candidate(request, source, Work.PROMPT)) + _total(generating)

    # -- terms -------------------------------------------------------------------------------------------------------

    def _candidate(self, request: RouteRequest, replica: Replica, work: Work) -> Candidate:
        cached = request.cached(replica)
        missing = max(1, request.num_tokens - cached.tokens)
        prefill_constant, prefill_slope = self._estimates.prefill_line(replica.worker_id)
        queue = prefill = transfer = decode = room = 0.0
        output = self._estimates.output_tokens(request.max_output_tokens)
        if work is not Work.GENERATE:
            queue = prefill_slope * self._commitments.queued_tokens(
                replica.address, prefill_slope, reported=replica.tokens_to_compute, reported_at=replica.reported_at
            )
            prefill = prefill_constant + prefill_slope * missing
        if work is not Work.PROMPT:
            running = max(replica.load, 0) + self._commitments.sequences(replica.address)
            constant, slope = self._estimates.step_line(replica.worker_id)
            step = constant + slope * (running + 1)
            decode = output * step
            room = self._room(replica, missing + output, running, output) * decode
        if work is Work.GENERATE and request.source is not None:
            transfer = self._transfer(request.source, replica, missing)
        written = missing + (0.0 if work is Work.PROMPT else output)
        eviction = self._evicted_tokens(replica, written) * prefill_slope * self._estimates.hit_share
        terms = Terms(queue, prefill, transfer, decode, room, eviction)
        return Candidate(replica, cached, request.weight(replica), terms)

    def _with_transfer(self, request: RouteRequest, source: Replica, target: Candidate) -> Candidate:
        terms = (target.terms or Terms())._replace(transfer=self._handoff(request, source, target))
        return Candidate(target.replica, target.cached, target.weight, terms)

    def _handoff(self, request: RouteRequest, source: Replica, target: Candidate) -> float:
        return self._transfer(source, target.replica, max(1, request.num_tokens - target.cached.tokens))

    def _transfer(self, source: Replica, target: Replica, num_tokens: float) -> float:
        distance = source.place.distance(target.place)
        constant, slope = self._estimates.transfer_line(source.worker_id, target.worker_id, distance)
        return constant + slope * num_tokens

    def _room(self, replica: Replica, num_tokens: float, running: int, output: float) -> float:
        """Return the wait for KV blocks, in durations of an output.

        Running sequences end one after another, at intervals of an output's duration divided by their number, and each
        frees an equal share of the blocks in use; until then, they grow by half an output.
        """
        if not replica.blocks_total:
            return 0.0
        free = replica.blocks_free - self._commitments.blocks(replica.address)
        lacking = math.ceil((num_tokens + running * output / 2) / replica.block_tokens) - free
        if lacking <= 0:
            return 0.0
        sequences = max(1, running)
        num_ended = math.ceil(lacking * sequences / max(1, replica.blocks_total - free))
        return min(_MAX_WAITS, num_ended / sequences)

    def _evicted_tokens(self, replica: Replica, num_tokens: float) -> float:
        """Return the number of cached tokens that `num_tokens` new tokens evict."""
        held = replica.blocks_total - replica.blocks_free
        evictable = max(0, replica.blocks_cached - held)
        unused = max(0, replica.blocks_free - evictable - self._commitments.blocks(replica.address))
        return float(max(0.0, min(evictable * replica.block_tokens, num_tokens - unused * replica.block_tokens)))


def _sorted(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: (_total(candidate), candidate.replica.address))


def _total(candidate: Candidate) -> float:
    return candidate.terms.total if candidate.terms is not None else 0.0


def _before_output(candidate: Candidate) -> float:
    terms = candidate.terms or Terms()
    return terms.queue + terms.prefill + terms.transfer


def _bound(seconds: float, before_output: float) -> float:
    return seconds + max(TIE_SHARE * before_output, TIE_SECONDS)


def _pick(chosen: Candidate, ranked: Sequence[Candidate]) -> Pick:
    preferred = max(ranked, key=rank).replica.worker_id
    shown = tuple(ranked[:MAX_RANKED])
    if chosen not in shown:
        shown = (*shown[:-1], chosen)
    return Pick(chosen.replica, preferred, 0, len(ranked), chosen.cached, shown, chosen.terms)
