"""The routing policies by name."""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import POLICIES
from kvferry.gateway.decide.estimates.estimates import Commitments, Estimates
from kvferry.gateway.decide.routing.latency import LatencyPolicy
from kvferry.gateway.decide.routing.plain_policies import least_loaded, round_robin, uniform
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.routes import Route, RouteRequest, RoutingPolicy


@dataclass(frozen=True, slots=True)
class OtherChoice:
    """The route that a policy which is not in use would have chosen."""

    policy: str
    prefill: str
    """Name of the prefill worker; empty if the route has none."""
    decode: str
    seconds: float
    """Latency of this route in seconds, as estimated by the policy `latency`."""


class RoutingPolicies:
    """The policy of one gateway, and the others, for comparison."""

    def __init__(self, name: str, estimates: Estimates, commitments: Commitments, *, load_factor: float) -> None:
        """
        Args:
            name: name of the policy that chooses routes.
            estimates, commitments: inputs of the policy `latency`, and of the estimates of other policies' routes.
            load_factor: see `RoutingConfig.load_factor`.

        Raises:
            UsageError: there is no such policy.
        """
        self.chosen = make_policy(name, estimates, commitments, load_factor=load_factor)
        self._others = {
            other: make_policy(other, estimates, commitments, load_factor=load_factor)
            for other in POLICIES
            if other != name
        }
        self._latency = LatencyPolicy(estimates, commitments)

    def others(self, request: RouteRequest, choose: Callable[[RoutingPolicy], Route | None]) -> tuple[OtherChoice, ...]:
        """Return the choices of the other policies for a request.

        Args:
            request: the routed request.
            choose: returns a policy's route for the request.
        """
        found = ((name, choose(policy)) for name, policy in self._others.items())
        return tuple(
            OtherChoice(
                name,
                "" if route.prefill is None else route.prefill.replica.worker_id,
                route.decode.replica.worker_id,
                self._latency.estimate(request, route),
            )
            for name, route in found
            if route is not None
        )


def make_policy(
    name: str, estimates: Estimates, commitments: Commitments, *, load_factor: float, seed: int | None = None
) -> RoutingPolicy:
    """Return the policy with this name.

    Args:
        name: one of `POLICIES`.
        estimates, commitments: inputs of the policy `latency`.
        load_factor: load bound of `prefix-hash`; see `RoutingConfig.load_factor`.
        seed: seed of the policy `random`; `None` seeds from the operating system.

    Raises:
        UsageError: there is no such policy.
    """
    if name == "latency":
        return LatencyPolicy(estimates, commitments)
    if name == "prefix-hash":
        return PrefixHash(load_factor)
    if name == "round-robin":
        return round_robin()
    if name == "least-loaded":
        return least_loaded()
    if name == "random":
        return uniform(seed)
    raise UsageError(f"policy must be one of {', '.join(POLICIES)}, not {name!r}", field="policy")
