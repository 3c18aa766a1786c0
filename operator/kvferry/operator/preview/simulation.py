"""Simulated cluster for previews: every write succeeds, and every pod is ready immediately. Pure, without an API
server."""

from dataclasses import replace

from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.objects.worker_pods import deployments
from kvferry.operator.plan.actions import (
    Action,
    ApplyObject,
    Autoscale,
    CreateKeys,
    CreateRecord,
    DeleteObject,
    Done,
    SeedScaler,
    SetReplicas,
    WriteStatus,
    WriteTls,
)
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.plan.memory import PassMemory, begin_pass, remember
from kvferry.operator.plan.pool_plan import Plan, plan_pool
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import ChildFacts, DeploymentFacts, PoolFacts, ScalerFacts, ServiceFacts
from kvferry.operator.pool.spec import InferencePool, Json
from kvferry.operator.pool.tls_state import data_of

_INSTALLED = frozenset({POD_MONITOR, EXTENSION_POOL})
_REPORTED = {"conditions": [{"type": "Ready", "reason": "Serving"}]}
_VERSION = "1"
_FAR = 1e12
"""Expiry of simulated certificates, wall-clock seconds."""
_CHILD = ChildFacts(_VERSION, "")


class SimulatedCluster:
    """Objects of a pool in a simulated cluster."""

    def __init__(self, default_image: str) -> None:
        self._default_image = default_image
        self._facts = PoolFacts()
        self._memory: PassMemory | None = None

    def add_record(self, pool: InferencePool, revision: str) -> None:
        """Add the record of a revision to roll back to, if it is missing."""
        memory = self._begin(pool)
        if pool.spec.rollout.rollback_to == revision and revision not in memory.records:
            made = deployments(pool, revision, self._default_image)
            self._memory = replace(memory, records={**memory.records, revision: made})
            self._facts.children["ControllerRevision", names.revision_object(pool.name, revision)] = _CHILD

    def settle(self, pool: InferencePool, max_passes: int) -> list[Plan]:
        """Reconcile until a plan has no actions; return the plans with actions.

        Args:
            pool: the pool to reconcile.
            max_passes: maximum number of passes.
        """
        plans: list[Plan] = []
        while len(plans) < max_passes:
            memory = self._begin(pool)
            plan = plan_pool(
                PlanContext(
                    pool=pool,
                    facts=self._facts,
                    memory=memory,
                    next_record=len(memory.records) + 1,
                    status=_REPORTED,
                    default_image=self._default_image,
                    installed=_INSTALLED,
                    now=0.0,
                    stamp="",
                )
            )
            self._memory = remember(plan.memory, [self._execute(action) for action in plan.actions], pool, 0.0, "")
            if not plan.actions:
                return plans
            plans.append(plan)
        return plans

    def _begin(self, pool: InferencePool) -> PassMemory:
        return begin_pass(self._memory, {"metadata": {"uid": pool.uid}, "status": _REPORTED}, _INSTALLED, 0.0)

    def _execute(self, action: Action) -> Done:
        facts = self._facts
        if isinstance(action, DeleteObject):
            facts.children.pop((action.kind, action.name), None)
        match action:
            case ApplyObject(manifest=manifest) | SeedScaler(manifest=manifest) | Autoscale(manifest=manifest):
                self._apply(manifest)
                stored = {**manifest, "metadata": {**manifest["metadata"], "generation": int(_VERSION)}}
                return Done(action, stored)
            case CreateKeys():
                return Done(action)  # The Secret exists, so no pods are replaced for new keys.
            case WriteTls(config=config, state=state):
                self._apply(config)
                signed = state.published("", 0.0).issued(0.0, _FAR, "")
                return Done(action, {**config, "data": data_of(signed)})
            case CreateRecord(manifest=manifest):
                facts.children[names.kind_of(manifest), manifest["metadata"]["name"]] = _CHILD
            case SetReplicas(name=name, replicas=replicas):
                facts.deployments[name] = _with_pods(facts.deployments[name], replicas)
            case DeleteObject(kind="Deployment", name=name):
                facts.deployments.pop(name, None)
            case DeleteObject(kind="PoolRoleScaler", name=name):
                gone = [role for role, scaler in facts.scalers.items() if scaler.uid == name]
                for role in gone:
                    del facts.scalers[role]
            case DeleteObject(kind="Service", name=name):
                facts.services.pop(name, None)
            case WriteStatus(manifest=manifest) if manifest["kind"] == "PoolRoleScaler":
                shown = manifest["status"]["replicas"], manifest["status"]["selector"]
                for role, scaler in facts.scalers.items():
                    if scaler.uid == manifest["metadata"]["name"]:
                        facts.scalers[role] = replace(scaler, shown=shown)
            case _:
                pass
        return Done(action, getattr(action, "manifest", None))

    def _apply(self, manifest: Json) -> None:
        name, labels = manifest["metadata"]["name"], manifest["metadata"].get("labels") or {}
        self._facts.children[names.kind_of(manifest), name] = _CHILD
        match manifest["kind"]:
            case "Deployment":
                plain = DeploymentFacts(
                    name=name,
                    uid=name,
                    role=labels[names.LABEL_ROLE],
                    revision=labels.get(names.LABEL_REVISION, ""),
                    settled=True,
                    desired=0,
                    pods=0,
                    ready=0,
                    updated=0,
                    stuck="",
                )
                self._facts.deployments[name] = _with_pods(plain, manifest["spec"]["replicas"])
            case "PoolRoleScaler":
                role = manifest["spec"]["role"]
                known = self._facts.scalers.get(role)
                replicas = manifest["spec"].get("replicas", known.replicas if known else 1)
                shown = known.shown if known else (-1, "")
                self._facts.scalers[role] = ScalerFacts(name, role, name, replicas, shown)
            case "Service":
                self._facts.services[name] = ServiceFacts(name, "")


def _with_pods(facts: DeploymentFacts, pods: int) -> DeploymentFacts:
    return replace(facts, desired=pods, pods=pods, ready=pods, updated=pods)
