"""Oracle for routing in the simulator: tries every worker for each request, and knows all later arrivals.

At each decision, the process forks once per choice. A child sends the request to that choice and continues the
simulation for `HORIZON` seconds of virtual time, in which policy `latency` routes the later requests; its cost is the
time that all requests wait for their first tokens until then. The parent takes the choice with the lowest cost. No
policy can know later arrivals and exact durations, so the difference from this oracle bounds what routing can gain
within the horizon (a rollout, Bertsekas, Dynamic Programming and Optimal Control, volume I, section 6.4).
"""

import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from kvferry.core.errors import InvariantBroken
from kvferry.gateway.decide.routing.routes import Pick, Replica, RouteRequest, Work
from kvferry.simulator.fleet.fleet import PoolResult, SimulatedPool
from kvferry.simulator.fleet.gateway import SimulatedGateway

HORIZON = 1.0
"""Virtual time for which a choice is simulated, in seconds."""
_AT_ONCE = 2
"""Number of children that run concurrently."""
_COST = struct.Struct("<d")


_Choice = TypeVar("_Choice")


class Oracle:
    """The policy `oracle` of one pool. Implements `RoutingPolicy`."""

    def __init__(self, pool: SimulatedPool) -> None:
        """
        Args:
            pool: a new pool; its policy routes the later requests in a child.
        """
        self._pool, self._base = pool, pool.gateway.policy
        pool.gateway.policy = self
        self._writer: int | None = None
        """Pipe to the parent, in a child."""
        self._waited_before = 0.0

    def run(self) -> PoolResult:
        """Simulate the pool until all requests have ended."""
        result = self._pool.run()
        if self._writer is not None:
            self._end()
        return result

    def one(self, request: RouteRequest, replicas: Sequence[Replica], work: Work) -> Pick | None:
        """See `Policy.one`."""
        if self._writer is not None or len(replicas) < 2:
            return self._base.one(request, replicas, work)
        return self._best([partial(self._base.one, request, [one], work) for one in replicas])

    def pair(
        self, request: RouteRequest, prefill: Sequence[Replica], decode: Sequence[Replica]
    ) -> tuple[Pick, Pick] | None:
        """See `Policy.pair`."""
        if self._writer is not None or not prefill or not decode:
            return self._base.pair(request, prefill, decode)
        return self._best([partial(self._base.pair, request, [p], [d]) for p in prefill for d in decode])

    def _best(self, choices: Sequence[Callable[[], _Choice]]) -> _Choice:
        """Return the choice whose continuation has the lowest cost; in a child, the choice that it simulates."""
        costs: list[float] = []
        for first in range(0, len(choices), _AT_ONCE):
            pipes: list[int] = []
            for choice in choices[first : first + _AT_ONCE]:
                reader, writer = os.pipe()
                if os.fork() == 0:
                    os.close(reader)
                    self._writer, self._waited_before = writer, _waited(self._pool.gateway)
                    self._pool.clock.after(HORIZON, self._end)
                    return choice()
                os.close(writer)
                pipes.append(reader)
            costs += map(_received, pipes)
        return choices[costs.index(min(costs))]()

    def _end(self) -> NoReturn:
        """Write the cost of the simulated choice and end this process."""
        assert self._writer is not None
        gateway = self._pool.gateway
        cost = _waited(gateway) + _waiting(gateway, self._pool.clock.now) - self._waited_before
        os.write(self._writer, _COST.pack(cost))
        os._exit(0)


def _waited(gateway: SimulatedGateway) -> float:
    """Return the time to first token in seconds, summed over the requests that have one."""
    return gateway.measures.ttft.total


def _waiting(gateway: SimulatedGateway, now: float) -> float:
    """Return the time in seconds, summed over the requests that still wait for their first tokens."""
    return sum(now - run.request.at for run in gateway.runs if run.first is None)


def _received(reader: int) -> float:
    """Return the cost that a child has written, and wait for its end.

    Raises:
        InvariantBroken: the child ended without a cost.
    """
    content = os.read(reader, _COST.size)
    os.close(reader)
    os.wait()
    if len(content) != _COST.size:
        raise InvariantBroken("a continuation of the simulation ended early")
    return float(_COST.unpack(content)[0])
