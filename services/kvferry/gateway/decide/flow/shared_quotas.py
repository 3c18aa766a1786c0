"""Quotas that the gateways of a pool share: each has leased a part of the budgets, and reports at intervals.

While the server with the shared budgets does not answer, a gateway has what it leased last, its part of what the shared
bucket had, and its part of each limit from then on.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.gateway.decide.flow.leased_budget import (
    INTERVAL_SECONDS,
    LEASE_SECONDS,
    BudgetReport,
    LeasedBudget,
    LeasedSlots,
    SlotReport,
)
from kvferry.gateway.decide.flow.quotas import QuotaExceeded, Quotas, over_quota
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy

_SHORTEST_SECONDS = INTERVAL_SECONDS / 2
"""Shortest time between two reports of a tenant for whom no request waits."""
_NO_BUDGET = BudgetReport(1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
_NO_SLOTS = SlotReport(-1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What a gateway has of a tenant's budgets, and what it requests."""

    tenant: str
    answered: int
    """Number of the last call about this tenant that was answered."""
    requests: BudgetReport
    tokens: BudgetReport
    slots: SlotReport


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What a gateway has of a tenant's budgets from now on."""

    requests: float
    requests_left: float
    are_requests_short: bool
    tokens: float
    tokens_left: float
    are_tokens_short: bool
    slots: int
    are_slots_short: bool

    @classmethod
    def parse(cls, text: bytes, report: LeaseReport) -> "LeaseAnswer":
        """Parse the answer to a report.

        Raises:
            ValueError: it is no answer that this report can have.
        """
        numbers = [float(word) for word in text.split()]
        if len(numbers) != 8 or not all(map(math.isfinite, numbers)):
            raise ValueError("an answer has 8 finite numbers")
        requests, requests_left, requests_short, tokens, tokens_left, tokens_short, slots, slots_short = numbers
        for held, budget in ((requests, report.requests), (tokens, report.tokens)):
            if not 0 <= held <= max(0.0, budget.capacity) + 1e-6:
                raise ValueError("an answer gives more than the bucket can have")
        if not 0 <= slots <= max(0, report.slots.limit):
            raise ValueError("an answer gives more slots than there are")
        return cls(
            requests, requests_left, requests_short > 0, tokens, tokens_left, tokens_short > 0, int(slots),
            slots_short > 0,
        )  # fmt: skip


@dataclass(slots=True)
class _TenantLease:
    """What this gateway has of one tenant's budgets."""

    policy: TenantPolicy
    requests: LeasedBudget = field(default_factory=LeasedBudget)
    tokens: LeasedBudget = field(default_factory=LeasedBudget)
    slots: LeasedSlots = field(default_factory=LeasedSlots)
    answered: int = 0
    reported_at: float = -math.inf
    alone_at: float | None = None
    """Time up to which units were added without an answer; `None` unless the server is not reached."""
    is_waited_for: bool = False
    """Whether a request waits for the answer to the next report."""

    def budgets(self) -> Iterator[tuple[str, LeasedBudget, float, float]]:
        """Yield name, budget, units per minute and capacity of each quota that the policy has."""
        policy = self.policy
        if policy.requests_per_minute is not None:
            yield "requests_per_minute", self.requests, policy.requests_per_minute, policy.request_capacity
        if policy.tokens_per_minute is not None:
            yield "tokens_per_minute", self.tokens, policy.tokens_per_minute, policy.token_capacity

    @property
    def is_active(self) -> bool:
        has_slots = self.policy.concurrent_requests is not None and self.slots.is_active
        return has_slots or any(budget.is_active for _, budget, _, _ in self.budgets())


@dataclass(slots=True)
class SharedQuotas(Quotas):
    """The accounts of one gateway, and what it has leased for them."""

    num_gateways: int = 1
    """Number of gateways of the pool, of the last answer."""
    leases: dict[str, _TenantLease] = field(default_factory=dict)
    num_calls: int = 0
    is_failing: bool = False
    """Whether the last call was not answered."""
    _answered_at: float = -math.inf
    """Time at which the last answered call was sent."""
    _sent_at: float = -math.inf
    _now: float = 0.0

    def is_alone(self, now: float) -> bool:
        """Whether the shared budgets are not reached, or have given this gateway's part to others meanwhile."""
        return self.is_failing or self._is_over(now)

    # -- requests ------------------------------------------------------------------------------------------------

    def lacks(self, tenant: str, policy: TenantPolicy, tokens: float, now: float) -> bool:
        """Note what a request cannot be paid with, and return whether it should wait for the answer to a report.

        Args:
            tenant: the tenant.
            policy: the tenant's quotas.
            tokens: expected number of tokens of the request.
            now: monotonic seconds.
        """
        lease, is_short = self._lease(tenant, policy, now), False
        waits = True
        if policy.concurrent_requests is not None and not lease.slots.has(self.account(tenant).num_open):
            lease.slots.lack()
            is_short, waits = True, _may_help(lease.slots, now)
        for name, budget, _, capacity in lease.budgets():
            cost = 1.0 if name == "requests_per_minute" else tokens
            if not budget.has(cost, capacity):
                budget.lack(cost, capacity)
                is_short, waits = True, waits and _may_help(budget, now)
        if not is_short or not waits or self.is_alone(now):
            return False
        lease.is_waited_for = True
        return True

    def check(self, tenant: str, policy: TenantPolicy, tokens: float, now: float) -> None:
        """See `Quotas.check`; `lacks` is called before."""
        lease, account, limit = self._lease(tenant, policy, now), self.account(tenant), policy.concurrent_requests
        if limit is not None and not lease.slots.has(account.num_open):
            raise over_quota(tenant, "concurrent_requests", limit, account.seconds / limit)
        for name, budget, _, capacity in lease.budgets():
            cost = 1.0 if name == "requests_per_minute" else tokens
            if not budget.has(cost, capacity):
                raise self._over(lease, tenant, name, cost)

    def check_requests(self, tenant: str, policy: TenantPolicy, now: float) -> None:
        """See `Quotas.check_requests`. Such a request does not wait; it may use this gateway's part of the shared
        bucket before it is leased."""
        lease = self._lease(tenant, policy, now)
        if policy.requests_per_minute is None:
            return
        per_minute, capacity, budget = policy.requests_per_minute, policy.request_capacity, lease.requests
        if budget.has(1.0, capacity):
            return
        part = 0.0 if self.is_alone(now) else budget.part(self.num_gateways, per_minute, capacity, now)
        if budget.rest - budget.offered + part < 1.0:
            budget.lack(1.0, capacity)
            raise self._over(lease, tenant, "requests_per_minute", 1.0)

    def begin(self, tenant: str, tokens: float) -> None:
        """See `Quotas.begin`."""
        account, lease = self.account(tenant), self.leases[tenant]
        account.num_open += 1
        lease.slots.use(account.num_open, self._now)
        for name, budget, _, _ in lease.budgets():
            budget.spend(1.0 if name == "requests_per_minute" else tokens, self._now)

    def count(self, tenant: str, policy: TenantPolicy, now: float) -> None:
        """See `Quotas.count`."""
        self.check_requests(tenant, policy, now)
        if policy.requests_per_minute is not None:
            self.leases[tenant].requests.spend(1.0, now)

    def end(self, tenant: str, expected: float, used: float) -> None:
        """See `Quotas.end`."""
        self.account(tenant).num_open -= 1
        lease = self.leases[tenant]
        if lease.policy.tokens_per_minute is not None:
            lease.tokens.correct(used - expected)

    def forget_all_but(self, known: frozenset[str]) -> None:
        """See `Quotas.forget_all_but`; what a tenant's lease has is given back first."""
        Quotas.forget_all_but(self, known)
        kept = set(known) | set(self.accounts)
        for tenant in [t for t, lease in self.leases.items() if t not in kept and not lease.is_active]:
            del self.leases[tenant]

    # -- reports -------------------------------------------------------------------------------------------------

    def reports(self, now: float, *, leaves: bool = False) -> Sequence[LeaseReport]:
        """Return the reports that are due: of tenants for whose answers requests wait, and at intervals of those that
        have leased, used or wanted anything.

        Args:
            now: monotonic seconds.
            leaves: whether this gateway ends, and gives everything back.
        """
        due = []
        for tenant, lease in self.leases.items():
            is_old = now - lease.reported_at >= _SHORTEST_SECONDS
            if lease.is_waited_for or ((is_old or leaves) and lease.is_active):
                due.append(self._report(tenant, lease, now))
        return due

    def sent(self, now: float) -> int:
        """Note that a call is sent; return its number."""
        self.num_calls += 1
        self._sent_at = now
        return self.num_calls

    def answer(self, answers: Mapping[str, LeaseAnswer], num_gateways: int, now: float) -> None:
        """Note the answers to the reports of the last call.

        Args:
            answers: answers by tenant.
            num_gateways: number of gateways of the pool.
            now: monotonic seconds.
        """
        self.is_failing, self._answered_at, self.num_gateways = False, self._sent_at, max(1, num_gateways)
        for tenant, each in answers.items():
            lease = self.leases[tenant]
            lease.requests.answered(each.requests, each.requests_left, now, is_short=each.are_requests_short)
            lease.tokens.answered(each.tokens, each.tokens_left, now, is_short=each.are_tokens_short)
            lease.slots.answered(each.slots, now, is_short=each.are_slots_short)
            lease.answered, lease.alone_at = self.num_calls, None

    def failed(self) -> None:
        """Note that the last call was not answered, or not as it should."""
        self.is_failing = True

    # -- internals -----------------------------------------------------------------------------------------------

    def _is_over(self, now: float) -> bool:
        """Whether the time of the leases has passed."""
        return not math.isinf(self._answered_at) and now - self._answered_at > LEASE_SECONDS

    def _lease(self, tenant: str, policy: TenantPolicy, now: float) -> _TenantLease:
        self._now = now
        lease = self.leases.get(tenant)
        if lease is None:
            lease = self.leases[tenant] = _TenantLease(policy)
        lease.policy = policy
        if self.is_alone(now):
            self._go_alone(lease, now)
        return lease

    def _go_alone(self, lease: _TenantLease, now: float) -> None:
        """Add this gateway's part of what the tenant has gained since the last call."""
        number = self.num_gateways
        for _, budget, per_minute, capacity in lease.budgets():
            if lease.alone_at is None:
                if self._is_over(now):
                    budget.forfeit()
                budget.refill_alone(budget.part(number, per_minute, capacity, now), capacity)
            else:
                elapsed = max(0.0, now - lease.alone_at)
                budget.refill_alone(elapsed * per_minute / 60.0 / number, max(1.0, capacity / number))
        if lease.policy.concurrent_requests is not None:
            lease.slots.alone(max(1, lease.policy.concurrent_requests // number))
        lease.alone_at = now

    def _report(self, tenant: str, lease: _TenantLease, now: float) -> LeaseReport:
        lease.reported_at, lease.is_waited_for = now, False
        # What all have used without an answer is charged before any gets more.
        settles = lease.alone_at is not None
        made = {
            name: budget.report(rate, capacity, now, settles=settles)
            for name, budget, rate, capacity in lease.budgets()
        }
        limit, slots = lease.policy.concurrent_requests, _NO_SLOTS
        if limit is not None:
            slots = lease.slots.report(limit, self.account(tenant).num_open, now)
        return LeaseReport(
            tenant,
            lease.answered,
            made.get("requests_per_minute", _NO_BUDGET),
            made.get("tokens_per_minute", _NO_BUDGET),
            slots,
        )

    def _over(self, lease: _TenantLease, tenant: str, quota: str, cost: float) -> QuotaExceeded:
        ((budget, per_minute, capacity),) = [found[1:] for found in lease.budgets() if found[0] == quota]
        if self.is_alone(self._now):
            missing = min(cost, capacity) - budget.rest
            wait = missing * 60.0 * self.num_gateways / per_minute
        else:
            wait = budget.wait_seconds(cost, per_minute, capacity, self._now)
        return over_quota(tenant, quota, per_minute, wait)


def _may_help(leased: LeasedBudget | LeasedSlots, now: float) -> bool:
    """Whether a report may be answered with more than the last one was."""
    return not leased.is_short or now - leased.seen_at >= 2 * INTERVAL_SECONDS
