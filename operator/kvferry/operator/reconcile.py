"""Reconcile loop of a pool: observe, plan, execute, report. Level-triggered and independent of kopf.

1. Observe: the watched facts, and the records that the plan needs.
2. Plan (`plan.pool_plan`): an ordered list of actions.
3. Execute (`apply.executor`). If a required action is rejected, replan with the rejection as a fact.
4. Report (`plan.pool_report`): events and status from the outcome, executed in the same way.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.operator.api import KubeApi
from kvferry.operator.apply.executor import Executor, PoolTarget
from kvferry.operator.apply.observe import read_records
from kvferry.operator.plan.actions import Done, Outcome, Problem
from kvferry.operator.plan.context import PlanContext, scaled_by
from kvferry.operator.plan.memory import PassMemory, begin_pass, remember
from kvferry.operator.plan.pool_plan import Plan, plan_pool, verify
from kvferry.operator.plan.pool_report import plan_report, status_change
from kvferry.operator.plan.status import unreadable_status
from kvferry.operator.plan.template_policy import TemplatePolicy
from kvferry.operator.pool.facts import Key, PoolFacts
from kvferry.operator.pool.spec import Json, parse_pool

Installed = Callable[[], frozenset[tuple[str, str]]]
"""Optional kinds that the cluster serves now, as (apiVersion, plural)."""


class Reconciler:
    """Reconciler of pools: sequential passes over each pool, different pools in parallel."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        identity: str,
        operator: str = "",
        default_image: str,
        template_policy: TemplatePolicy = TemplatePolicy.ANY,
        installed: Installed,
        applied: Callable[[Json], None] = lambda body: None,
    ) -> None:
        """
        Args:
            api: client of the cluster's API server.
            clock: clock of all passes.
            identity: identity of the operator, for events.
            operator: namespace and name of the operator's lease, for the status.
            default_image: image for pools without `spec.image`.
            template_policy: what the templates of pools may contain.
            installed: optional kinds that the cluster serves.
            applied: called with every applied object, on the thread of the reconcile.
        """
        self._api = api
        self._clock = clock
        self._executor = Executor(api, identity, lambda: rfc3339(clock.wall()), applied, clock.wall)
        self._default_image = default_image
        self._template_policy = template_policy
        self._operator = operator
        self._installed = installed
        self._memories: dict[Key, PassMemory] = {}

    def reconcile(self, key: Key, facts: PoolFacts) -> float | None:
        """Run one pass over a pool; return the time until the next pass in seconds, or `None` if it is due only after
        a change.

        Raises:
            Unavailable: the API server is unavailable.
            ApiRefusal: a read or the write of the pool's status was rejected.
        """
        body = facts.body
        if body is None:
            self._memories.pop(key, None)
            return None
        if "deletionTimestamp" in body["metadata"]:
            return None  # The garbage collector deletes the pool's objects; a write would recreate them.
        now, stamp = self._clock.monotonic(), rfc3339(self._clock.wall())
        installed = self._installed()
        memory = begin_pass(self._memories.get(key), body, installed, now)
        status = body.get("status") or {}
        try:
            pool = parse_pool(body)
            if memory.keys:  # newer than the keys in `status`, which may be outdated
                pool = msgspec.structs.replace(pool, keys=memory.keys)
            if memory.verified_generation != pool.generation:
                verify(pool, self._default_image, self._template_policy)
                memory = replace(memory, verified_generation=pool.generation)
        except UsageError as error:
            self._report_unreadable(key, memory, unreadable_status(body, error.message, stamp), stamp)
            return None
        owned = facts.owned_by(pool.uid)
        self._memories[key] = memory
        records, next_record = read_records(self._api, pool, owned, memory.records, self._default_image)
        ctx = PlanContext(
            pool=pool,
            facts=owned,
            memory=replace(memory, records=records),
            next_record=next_record,
            status=status,
            default_image=self._default_image,
            installed=installed,
            now=now,
            stamp=stamp,
            wall=self._clock.wall(),
            operator=self._operator,
        )
        stuck = tuple(f"{d.name}: {d.stuck}" for d in owned.deployments.values() if d.stuck)
        return self._run(ctx, PoolTarget(key, pool.uid, stuck))

    def _report_unreadable(self, key: Key, memory: PassMemory, status: Json, stamp: str) -> None:
        outcome = self._executor.run(
            PoolTarget(key, memory.uid), status_change(key.namespace, key.pool, status, memory, stamp)
        )
        self._keep(key, memory if outcome.failure is not None else replace(memory, status=status), outcome)

    def _run(self, ctx: PlanContext, target: PoolTarget) -> float:
        plan, outcome, memory = self._execute(ctx, target)
        report = plan_report(ctx, plan, outcome, memory)
        last = self._executor.run(target, report.actions)
        self._keep(target.key, self._remembered(report.memory, last, ctx), last)
        return report.again_seconds

    def _execute(self, ctx: PlanContext, target: PoolTarget) -> tuple[Plan, Outcome, PassMemory]:
        """Plan and execute until no required action is rejected. Each round adds a fact, so the loop terminates."""
        done: list[Done] = []
        problems: dict[str, Problem] = {}
        while True:
            plan = plan_pool(replace(ctx, problems=problems, scaled=scaled_by(done)))
            outcome = self._executor.run(target, plan.actions)
            done += outcome.done
            problems |= outcome.problems
            if outcome.failure is not None:
                self._keep(target.key, self._remembered(ctx.memory, outcome, ctx), outcome)
            if not outcome.must_replan:
                memory = self._remembered(plan.memory, outcome, ctx)
                return plan, Outcome(tuple(done), problems), memory
            ctx = replace(ctx, memory=self._remembered(ctx.memory, outcome, ctx))

    def _remembered(self, memory: PassMemory, outcome: Outcome, ctx: PlanContext) -> PassMemory:
        return remember(memory, outcome.done, ctx.pool, ctx.now, ctx.stamp)

    def _keep(self, key: Key, memory: PassMemory, outcome: Outcome) -> None:
        """Store the memory that includes the completed actions, even if later actions failed; then raise the failure,
        if there is one."""
        self._memories[key] = memory
        if outcome.failure is not None:
            raise outcome.failure


def rfc3339(seconds: float) -> str:
    """Format seconds since the Unix epoch as RFC 3339, as Kubernetes does."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
