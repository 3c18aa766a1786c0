"""How many pods each role wants: its scaler's number, written by whom the pool's scaling mode says.

| mode | who writes `spec.replicas` of the scaler |
| --- | --- |
| Static | the operator, from the pool; not over somebody else's number |
| External | nobody here, after a first number that keeps what there is |
| Auto | the autoscaler, under a field manager of its own |
"""

from kvferry.operator import names
from kvferry.operator.api import FieldConflict
from kvferry.operator.autoscale import decide
from kvferry.operator.pool_pass import PoolPass
from kvferry.operator.rollout import RoleState
from kvferry.operator.spec import Role
from kvferry.operator.surroundings import scaler

_LOG = 5


def wanted_pods(this: PoolPass) -> dict[str, int]:
    """Apply the scalers; the pods wanted of each role."""
    return {role.name: role.bounded(_number(this, role)) for role in this.pool.spec.roles}


def show_scalers(this: PoolPass, roles: list[RoleState]) -> None:
    """Write what `/scale` shows: pods that exist, and how to find them."""
    for role in roles:
        facts = this.facts.scalers.get(role.name)
        if facts is None or this.pool.spec.role(role.name) is None:
            continue
        selector = f"{names.LABEL_POOL}={this.pool.name},{names.LABEL_ROLE}={role.name}"
        pods = sum(d.pods for d in this.facts.deployments.values() if d.role == role.name)
        if facts.shown == (pods, selector):
            continue
        name = names.role_object(this.pool.name, role.name)
        shown = {
            "apiVersion": names.API_VERSION,
            "kind": "PoolRoleScaler",
            "metadata": {"namespace": this.pool.namespace, "name": name},
            "status": {"replicas": pods, "selector": selector},
        }
        with this.noting(f"PoolRoleScaler {name}"):
            this.api.apply(shown, subresource="status", force=True)


def _number(this: PoolPass, role: Role) -> int:
    facts = this.facts.scalers.get(role.name)
    mode = role.scaling.mode
    now = role.replicas if facts is None else facts.replicas
    what = f"PoolRoleScaler {names.role_object(this.pool.name, role.name)}"
    with this.noting(what):
        if mode == "Static":
            return _static(this, role)
        if facts is None:
            first = scaler(this.pool, role, role.bounded(max(1, role.scaling.min_replicas)))
            return int(this.api.apply(first, manager=names.SEED_MANAGER)["spec"]["replicas"])
        if this.memory.seeded.get(role.name) != mode:
            # Somebody must own the number before the operator gives it up, or it would fall back to its default.
            _seed(this, role, now)
        this.memory.children.apply(scaler(this.pool, role, None))
        return now if mode == "External" else _auto(this, role, now)
    return now


def _static(this: PoolPass, role: Role) -> int:
    facts = this.facts.scalers.get(role.name)
    this.memory.seeded.pop(role.name, None)
    this.memory.children.apply(scaler(this.pool, role, role.replicas), "" if facts is None else str(facts.generation))
    return role.replicas


def _seed(this: PoolPass, role: Role, now: int) -> None:
    whole = scaler(this.pool, role, now)
    # The number, and what an object of the kind must have; more would stand in the operator's own way.
    seed = {
        "apiVersion": whole["apiVersion"],
        "kind": whole["kind"],
        "metadata": {"namespace": this.pool.namespace, "name": whole["metadata"]["name"]},
        "spec": whole["spec"],
    }
    try:
        this.api.apply(seed, manager=names.SEED_MANAGER)
    except FieldConflict as conflict:
        if not all(c.field == ".spec.replicas" for c in conflict.conflicts):
            raise
        # Another manager owns the number already, which is all that a seed is for.
    this.memory.seeded[role.name] = role.scaling.mode


def _auto(this: PoolPass, role: Role, now: int) -> int:
    ready = sum(d.ready for d in this.facts.deployments.values() if d.role == role.name)
    decision = decide(role, now, ready, this.facts.report, this.memory.histories.get(role.name), this.now)
    this.memory.histories[role.name] = decision.history
    if decision.replicas == now:
        return now
    this.api.apply(scaler(this.pool, role, decision.replicas), manager=names.AUTOSCALER_MANAGER)
    entry = {"role": role.name, "from": now, "to": decision.replicas, "at": this.stamp, "reason": decision.reason}
    this.memory.scaling_log = [entry, *this.memory.scaling_log][:_LOG]
    return decision.replicas
