"""Budgets of one tenant that one gateway has leased: units of a token bucket, and slots of concurrent requests.

The gateways of a pool share one bucket and one number of slots per tenant, which the Redis server has. A gateway takes
a part of them in advance, so that a request costs no round trip, and reports at intervals:

    rest      what it has and has not used; negative if requests used more than was expected of them
    spent     what it has used since its last report that was answered
    firm      what it expects to use until the next report
    target    what it requests, if no other gateway lacks any
    need      the smallest cost that it could not pay; a smaller rest is of no use to it

The answer is what it has from now on. `rest + spent` is what it had after its last answer, so that the server can tell
what a lost answer gave from what was used.
"""

import math
from dataclasses import dataclass

INTERVAL_SECONDS = 0.25
"""Interval of the reports of a tenant that sends requests."""
LEASE_SECONDS = 5.0
"""Time after its last report for which a gateway uses what it has."""
_WANTED_SECONDS = 1.0
"""Time for which a gateway goes on asking for slots after it had to refuse a request."""
_KEPT_SECONDS = 2.0
"""Time after its last use for which a gateway keeps enough for one more request."""
_KEPT_PART = 8
"""It keeps none if one request takes more than so much of the limit: others would be refused meanwhile."""
_MANY = 1e15


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Report of one budget; all values in units of the bucket."""

    per_minute: float
    capacity: float
    rest: float
    spent: float
    firm: float
    target: float
    need: float
    hint: float
    """Level of the shared bucket after the last answer, if a server has lost its data; -1 if there was none."""


class LeasedBudget:
    """Units of a token bucket that a gateway may use without asking."""

    __slots__ = (
        "_demand", "_last_cost", "_level", "_need", "_refused", "_reported_at", "_sent", "_spent", "_used_at",
        "is_short", "offered", "rest", "seen_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rest = 0.0
        self.offered = 0.0
        """Part of the rest that a report under way gives back."""
        self.is_short = False
        """Whether the last answer gave less than the gateway requested."""
        self.seen_at = -math.inf
        """Time of the last answer, monotonic seconds."""
        self._spent = 0.0
        self._sent = (0.0, 0.0)
        """Rest and spent of the report under way."""
        self._level = 0.0
        self._demand = 0.0
        self._refused = 0.0
        self._need = 0.0
        self._last_cost = 0.0
        self._used_at = self._reported_at = -math.inf

    @property
    def is_active(self) -> bool:
        """Whether the server must hear of this budget."""
        return self.rest != 0.0 or self._spent != 0.0 or self._refused > 0.0 or self.is_short or self._demand > 0.0

    def has(self, cost: float, capacity: float) -> bool:
        """Return whether a request of `cost` units can be paid; one above the capacity needs a full bucket."""
        return self.rest - self.offered >= min(cost, capacity) - 1e-9

    def lack(self, cost: float, capacity: float) -> None:
        """Note a request that could not be paid."""
        cost = min(cost, capacity)
        self._refused = min(_MANY, self._refused + cost)
        self._need = min(self._need or cost, cost)

    def spend(self, cost: float, now: float) -> None:
        """Use the units of a request."""
        self.correct(cost)
        self._last_cost, self._used_at = cost, now

    def correct(self, cost: float) -> None:
        """Use further units, or give units back with a negative cost."""
        self.rest -= cost
        self._spent += cost

    def wait_seconds(self, cost: float, per_minute: float, capacity: float, now: float) -> float:
        """Return the time until the shared bucket can have `cost` units, if no other request uses any; seconds."""
        gained = 0.0 if math.isinf(self.seen_at) else max(0.0, now - self.seen_at) * per_minute / 60.0
        missing = min(cost, capacity) - (self.rest - self.offered) - self._level - gained
        return max(0.0, missing) * 60.0 / per_minute

    def part(self, gateways: int, per_minute: float, capacity: float, now: float) -> float:
        """Return this gateway's part of what the shared bucket should have now.

        Args:
            gateways: number of gateways of the pool.
            per_minute: units that the shared bucket gains per minute.
            capacity: its size.
            now: monotonic seconds.
        """
        level = capacity
        if not math.isinf(self.seen_at):
            level = min(capacity, self._level + max(0.0, now - self.seen_at) * per_minute / 60.0)
        return max(0.0, level) / gateways

    def report(self, per_minute: float, capacity: float, now: float, *, settles: bool = False) -> BudgetReport:
        """Return the report that is due; what it may give back is not used until its answer.

        Args:
            per_minute: units that the shared bucket gains per minute.
            capacity: its size.
            now: monotonic seconds.
            settles: whether the report only says what was used, and requests nothing.
        """
        fresh = max(0.0, self._spent - self._sent[1]) + self._refused
        self._demand = max(fresh, self._demand * 0.5 ** ((now - self._reported_at) / INTERVAL_SECONDS))
        self._reported_at = now
        if settles:
            self._used_at, self._need = -math.inf, 0.0
        if settles or self._demand < self._last_cost / 4:
            self._demand = 0.0
        firm = min(capacity, self._demand)
        is_kept = now - self._used_at < _KEPT_SECONDS and self._last_cost <= capacity / _KEPT_PART
        kept = self._last_cost if is_kept else 0.0
        target = min(capacity, max(2 * self._demand, kept))
        self.offered = max(0.0, self.rest - max(0.0, min(firm, target)))
        self._sent = self.rest, self._spent
        hint = -1.0 if math.isinf(self.seen_at) else max(0.0, self._level)
        made = BudgetReport(per_minute, capacity, self.rest, self._spent, firm, target, self._need, hint)
        self._refused = self._need = 0.0
        return made

    def answered(self, held: float, level: float, now: float, *, is_short: bool) -> None:
        """Note the answer to a report.

        Args:
            held: what the gateway had when the answer was made.
            level: what the shared bucket has left.
            now: monotonic seconds.
            is_short: whether the gateway wanted more.
        """
        rest, spent = self._sent
        self.rest += held - rest
        self._spent -= spent
        self._sent = 0.0, 0.0
        self.offered = 0.0
        self._level, self.seen_at, self.is_short = level, now, is_short

    def forfeit(self) -> None:
        """Note that others have got what this gateway had."""
        self.rest, self.offered = min(0.0, self.rest), 0.0

    def refill_alone(self, amount: float, capacity: float) -> None:
        """Add units without an answer, while the server is not reached, up to `capacity`."""
        self.rest = max(self.rest, min(capacity, self.rest + amount))
        self.offered = 0.0


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Report of concurrent requests; all values are numbers of requests."""

    limit: int
    open: int
    firm: int
    target: int


class LeasedSlots:
    """Concurrent requests that a gateway may have open."""

    __slots__ = (
        "_num_refused", "_num_wanted", "_offered", "_peak", "_used_at", "_wanted_at", "is_short", "limit", "seen_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.limit = 0
        """Number of requests that may be open."""
        self.is_short = False
        self.seen_at = -math.inf
        self._offered = _MANY
        self._num_refused = self._num_wanted = 0
        self._peak = 0
        self._used_at = self._wanted_at = -math.inf

    @property
    def is_active(self) -> bool:
        """Whether the server must hear of these slots."""
        return self.limit > 0 or self._num_refused > 0 or self.is_short

    def has(self, num_open: int) -> bool:
        """Return whether one more request may be open."""
        return num_open < min(self.limit, self._offered)

    def lack(self) -> None:
        """Note a request that got no slot."""
        self._num_refused += 1

    def use(self, num_open: int, now: float) -> None:
        """Note a request that was opened, the last of `num_open`."""
        self._peak, self._used_at = max(self._peak, num_open), now

    def report(self, limit: int, num_open: int, now: float) -> SlotReport:
        """Return the report that is due.

        Args:
            limit: number of requests that the gateways may have open together.
            num_open: number of requests that this one has open.
            now: monotonic seconds.
        """
        if self._num_refused or now - self._wanted_at >= _WANTED_SECONDS:
            self._num_wanted, self._wanted_at = self._num_refused, now
        firm = min(limit, num_open + self._num_wanted)
        kept = int(now - self._used_at < _KEPT_SECONDS and limit >= _KEPT_PART)
        target = min(limit, max(firm + kept, self._peak))
        self._peak = max(num_open, self._peak - max(1, self._peak // 2))
        self._num_refused = 0
        self._offered = min(firm, target)
        return SlotReport(limit, num_open, firm, target)

    def answered(self, limit: int, now: float, *, is_short: bool) -> None:
        """Note the answer to a report; see `LeasedBudget.answered`."""
        self.limit, self.seen_at, self.is_short = limit, now, is_short
        self._offered = _MANY

    def alone(self, limit: int) -> None:
        """Use a part of the limit while the server is not reached."""
        self.limit, self._offered = limit, _MANY
