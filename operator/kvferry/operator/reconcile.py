"""One pool from what is to what is wanted: observe, plan, apply, report. Level-triggered, no kopf.

1. Read the pool; one that is being deleted is left to the garbage collector.
2. Objects around the pods, each only where it changed.
3. Scalers: how many pods each role wants.
4. The revision that pods should run, recorded before it is used.
5. The next step of the rollout, applied.
6. The gateway.
7. What is no longer needed.
8. The status, also when something was refused on the way.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.operator import names
from kvferry.operator.api import KubeApi
from kvferry.operator.apply_rollout import apply_step, role_states, target_revision, tidy
from kvferry.operator.apply_scalers import show_scalers, wanted_pods
from kvferry.operator.apply_surroundings import apply_gateway, apply_surroundings
from kvferry.operator.children import Children
from kvferry.operator.events import Events
from kvferry.operator.facts import FleetReport, Key, PoolFacts
from kvferry.operator.gateway_pods import gateway_deployment
from kvferry.operator.pool_pass import Memory, PoolPass
from kvferry.operator.rollout import RoleState, next_step
from kvferry.operator.spec import Json, Pool, parse_pool
from kvferry.operator.status import Observed, first_status, status_of, unreadable_status
from kvferry.operator.surroundings import EXTENSION_POOL, POD_MONITOR, surroundings
from kvferry.operator.trouble import in_the_way
from kvferry.operator.workers import deployments, revision_of

_RESYNC_SECONDS = 600.0
_AUTOSCALE_SECONDS = 2.0
_REFUSED_SECONDS = 5.0
_LOOK_CLOSER_SECONDS = 5.0
"""Pods that have not moved for so long are asked why."""

Installed = Callable[[], frozenset[tuple[str, str]]]
"""Kinds of others that the cluster has now, as (apiVersion, plural)."""


class Reconciler:
    """Reconciles pools; one at a time for each pool, different ones in parallel."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        events: Events,
        *,
        default_image: str,
        installed: Installed,
        applied: Callable[[Json], None] = lambda body: None,
    ) -> None:
        """
        Args:
            default_image: of pools that name none.
            applied: told what each write made, from the thread of the reconcile.
        """
        self._applied = applied
        self._api = api
        self._clock = clock
        self._events = events
        self._default_image = default_image
        self._installed = installed
        self._memories: dict[Key, Memory] = {}

    def reconcile(self, key: Key, facts: PoolFacts) -> float | None:
        """One pass; seconds after which another one is due, `None`: when something changes.

        Raises:
            Unavailable: the API server is away.
            ApiRefusal: the status, or what every pass reads, was refused.
        """
        body = facts.body
        if body is None:
            self._memories.pop(key, None)
            return None
        if "deletionTimestamp" in body["metadata"]:
            return None  # the garbage collector has the word; writing now would bring children back
        now = self._clock.monotonic()
        memory = self._memories.get(key)
        if memory is None or memory.uid != body["metadata"]["uid"]:
            memory = Memory(body["metadata"]["uid"], Children(self._api, self._applied), now, moved_at=now, born_at=now)
            self._memories[key] = memory
        if now - memory.applied_at > _RESYNC_SECONDS:
            memory.children.forget()
            memory.applied_at = now
        if not memory.told:
            memory.told = {c["type"]: c["reason"] for c in (body.get("status") or {}).get("conditions") or ()}
        before, stamp = body.get("status") or {}, rfc3339(self._clock.wall())
        try:
            pool = parse_pool(body)
            if memory.readable != pool.generation:
                self._try_making(pool)
                memory.readable = pool.generation
        except UsageError as error:
            generation = int(body["metadata"]["generation"])
            self._report(key, memory, unreadable_status(generation, error.message, before, stamp))
            return None
        if not before.get("conditions"):
            self._report(key, memory, first_status(pool, stamp))
        left = facts.owned_by(pool.uid)
        this = PoolPass(self._api, key, pool, left, memory, before, now, stamp, self._default_image, self._installed())
        return self._pass(this)

    def _try_making(self, pool: Pool) -> None:
        """Templates are free in form, so that making pods of them may fail in any way.

        Raises:
            UsageError: it does.
        """
        try:
            surroundings(pool, frozenset({POD_MONITOR, EXTENSION_POOL}))
            gateway_deployment(pool, self._default_image)
            deployments(pool, revision_of(pool, self._default_image), self._default_image)
        except Exception as error:
            raise UsageError(f"no pods can be made from its templates and sizes: {error!r}", field="spec") from error

    def _pass(self, this: PoolPass) -> float | None:
        rollout = this.pool.spec.rollout
        apply_surroundings(this)
        wanted = wanted_pods(this)
        revision = target_revision(this)
        roles = role_states(this, wanted)
        step = next_step(roles, revision, rollout)
        if this.rollback is None:
            apply_step(this, roles, step)
        gateway_ready, gateway_needs = apply_gateway(this)
        tidy(this, revision, step.done)
        show_scalers(this, roles)
        waiting_for = "; ".join(needs for needs in (step.waiting_for, gateway_needs) if needs)
        if waiting_for:
            this.memory.settled_at = None
        elif this.memory.settled_at is None:
            this.memory.settled_at = this.now
        stuck, detail = self._stuck(this, roles, waiting_for)
        status = status_of(
            Observed(
                pool=this.pool,
                revision=revision,
                roles=roles,
                waiting_for=f"{waiting_for} ({detail})" if detail else waiting_for,
                gateway_desired=this.pool.spec.gateway.replicas,
                gateway_ready=gateway_ready,
                report=_word(this),
                handoffs=this.facts.report.handoffs if this.facts.report else {},
                stuck=stuck,
                contested=this.contested,
                refused=this.refused,
                rollback=this.rollback,
                extension=this.extension,
            ),
            this.before,
            this.stamp,
        )
        log = this.memory.scaling_log or this.before.get("scaling")
        if log:
            status["scaling"] = list(log)
        self._events.tell(this.pool, status, this.memory.told)
        self._report(this.key, this.memory, status)
        return self._again(this, waiting_for)

    def _stuck(self, this: PoolPass, roles: list[RoleState], waiting_for: str) -> tuple[str, str]:
        """What to say once nothing has moved for longer than the deadline, and what pods say that is in the way."""
        memory, deadline = this.memory, this.pool.spec.rollout.progress_deadline_seconds
        progress = (this.pool.generation, *((role.name, role.wanted, tuple(role.revisions.items())) for role in roles))
        if progress != memory.progress or not waiting_for:
            memory.progress, memory.moved_at = progress, this.now
        still = this.now - memory.moved_at
        detail = in_the_way(this) if still >= _LOOK_CLOSER_SECONDS else ""
        if still < deadline:
            return "", detail
        return f"no progress for {deadline} s: {detail or waiting_for}", detail

    def _again(self, this: PoolPass, waiting_for: str) -> float | None:
        waits = []
        if this.memory.keys_until > this.now:  # else the pool has keys of its own, or they were refused
            waits.append(this.memory.keys_until - this.now)
        if any(role.scaling.mode == "Auto" for role in this.pool.spec.roles):
            waits.append(_AUTOSCALE_SECONDS)
        if this.facts.report is not None and _word(this) is None:
            waits.append(_AUTOSCALE_SECONDS)
        if this.refused is not None or this.contested is not None:
            waits.append(_REFUSED_SECONDS)
        if waiting_for:
            waits.append(_LOOK_CLOSER_SECONDS)
        return min(waits, default=_RESYNC_SECONDS)

    def _report(self, key: Key, memory: Memory, status: Json) -> None:
        if status == memory.status:
            return
        self._api.apply(
            {
                "apiVersion": names.API_VERSION,
                "kind": "InferencePool",
                "metadata": {"namespace": key.namespace, "name": key.pool},
                "status": status,
            },
            subresource="status",
            force=True,
        )
        memory.status = status


def _word(this: PoolPass) -> FleetReport | None:
    """What the gateway says; once nothing is waited for any more, only what it has said since then."""
    report, settled_at = this.facts.report, this.memory.settled_at
    return None if report is None or (settled_at is not None and report.at < settled_at) else report


def rfc3339(seconds: float) -> str:
    """A moment as Kubernetes writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
