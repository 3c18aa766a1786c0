"""Chooses the workers of a request: first the roles that it needs, then the replicas by a policy of
`gateway.decide.routing`."""

from dataclasses import dataclass
from typing import NamedTuple

from kvferry.gateway.decide.routing.replicas import Candidates, readers
from kvferry.gateway.decide.routing.routes import Policy, Route, RouteReason, RouteRequest, Work


class Layout(NamedTuple):
    """Layout of KV blocks, by which their readers are found."""

    fingerprint: bytes
    """Workers with the same fingerprint read the blocks without conversion."""
    family: bytes = b""
    """Workers of the same family can convert them; empty if conversion is not possible."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sample, on which the roles that it needs depend."""

    num_prompt: int
    """Number of tokens of its prompt."""
    has_output: bool = False
    """Whether it has emitted tokens, and continues after a lost worker."""
    offered: Layout | None = None
    """Layout of the blocks that a prefill worker offers for it; `None` without an offer."""


def choose_route(
    request: RouteRequest, candidates: Candidates, policy: Policy, progress: Progress, *, skip_prefill_below: int
) -> Route | None:
    """Choose the route of a sample's next attempt; `None` if no replica can serve it.

    Args:
        request: the request.
        candidates: replicas that accept requests.
        policy: chooses among the replicas of a role.
        progress: progress of the sample.
        skip_prefill_below: number of uncached prompt tokens below which a decode worker computes them itself; 0 always
            uses a prefill worker.
    """
    offered = progress.offered
    if offered is not None:
        fitting = readers(candidates.decode, offered.fingerprint, offered.family)
        is_equal = not fitting or fitting[0].fingerprint == offered.fingerprint
        reason = RouteReason.PAIR if is_equal else RouteReason.CONVERTED
        return choose(request, Candidates(decode=fitting), policy, skip_prefill=reason)
    if progress.has_output:
        return choose(request, candidates, policy, skip_prefill=RouteReason.RESUME)
    if progress.num_prompt < skip_prefill_below:
        return choose(request, candidates, policy, skip_prefill=RouteReason.SHORT_PROMPT)
    enough = progress.num_prompt - skip_prefill_below + 1 if skip_prefill_below else None
    return choose(request, candidates, policy, enough_tokens=enough)


def choose(
    request: RouteRequest,
    candidates: Candidates,
    policy: Policy,
    *,
    skip_prefill: RouteReason | None = None,
    enough_tokens: int | None = None,
) -> Route | None:
    """Choose the route of a request; `None` if no replica can serve it.

    Args:
        request: the request.
        candidates: replicas that accept requests.
        policy: chooses among the replicas of a role.
        skip_prefill: reason why no prefill worker is needed; `None` if a prefill worker is needed.
        enough_tokens: minimum number of cached tokens, as reported by a decode worker, with which it needs no prefill
            worker; `None` if a prefill worker is always needed.
    """
    if skip_prefill is not None:
        work = Work.WHOLE if request.source is None else Work.GENERATE
        alone = policy.one(request, candidates.decode, work) or policy.one(request, candidates.both, work)
        return None if alone is None else Route(None, alone, skip_prefill)
    pair = _pair(request, candidates, policy)
    if enough_tokens is not None:
        warm = policy.one(request, candidates.decode, Work.WHOLE)
        if warm is not None and warm.cached.confirmed_tokens >= enough_tokens:
            tail = Route(None, warm, RouteReason.SHORT_TAIL)
            if pair is None or tail.seconds <= pair.seconds:
                return tail
    if pair is not None:
        return pair
    whole = policy.one(request, candidates.both, Work.WHOLE)
    if whole is not None:
        return Route(None, whole, RouteReason.BOTH)
    alone = policy.one(request, candidates.decode, Work.WHOLE)
    return None if alone is None else Route(None, alone, RouteReason.NO_PREFILL)


def choose_pooling(request: RouteRequest, candidates: Candidates, policy: Policy) -> Route | None:
    """Choose the worker that computes a vector: one that computes prompts; `None` if there is none. Workers of role
    `both` are used only without prefill workers, as for generation.

    Args:
        request: properties of the request.
        candidates: workers that accept requests.
        policy: policy that ranks the workers.
    """
    found = policy.one(request, candidates.prefill, Work.PROMPT) or policy.one(request, candidates.both, Work.PROMPT)
    return None if found is None else Route(None, found, RouteReason.POOLING)


def _pair(request: RouteRequest, candidates: Candidates, policy: Policy) -> Route | None:
    """Choose a pair with equal layouts or, if there is none, a pair that converts blocks."""
    decodable = {replica.fingerprint for replica in candidates.decode}
    prefill = [p for p in candidates.prefill if p.fingerprint in decodable]
    if not prefill:
        prefill = [p for p in candidates.prefill if readers(candidates.decode, p.fingerprint, p.family)]
    found = policy.pair(request, prefill, candidates.decode)
    if found is None:
        return None
    first, second = found
    equal = first.replica.fingerprint == second.replica.fingerprint
    return Route(first, second, RouteReason.PAIR if equal else RouteReason.CONVERTED)
