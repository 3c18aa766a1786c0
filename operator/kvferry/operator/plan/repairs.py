"""Events about what a pass has repaired: deleted objects, lost keys, numbers of replicas that others wrote. Pure."""

from collections.abc import Iterator

from kvferry.operator.plan.actions import ApplyObject, CreateKeys, Done, EmitEvent, Outcome
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.plan.memory import digest_of, place_of

_MAX_NAMED = 3


def repair_events(ctx: PlanContext, outcome: Outcome) -> Iterator[EmitEvent]:
    """Yield the events about the repairs of a pass.

    Args:
        ctx: observations before the pass.
        outcome: outcome of all actions of the pass.
    """
    restored = list(dict.fromkeys(done.action.target for done in outcome.done if _is_restored(ctx, done)))
    if restored:
        yield EmitEvent("Normal", "Restored", f"created again, since it was deleted: {named(restored)}")
    for done in outcome.done:
        match done.action:
            case CreateKeys(is_replacement=True) if done.stored is not None:
                yield EmitEvent(
                    "Warning",
                    "KeysReplaced",
                    f"{done.action.target} was lost: new keys were generated, and all pods are replaced. Blocks that "
                    "tiers hold under the lost keys are not found any more",
                )
            case CreateKeys() if done.stored is not None:
                yield EmitEvent(
                    "Normal",
                    "KeysGenerated",
                    f"{done.action.target} did not exist: new keys were generated. To find the blocks that tiers hold "
                    "from before a restored backup, restore the Secret before the pool",
                )
            case ApplyObject() as action if (found := _reset_number(ctx, action)) is not None:
                role = action.manifest["spec"]["role"]
                wanted = action.manifest["spec"]["replicas"]
                yield EmitEvent(
                    "Warning",
                    "ReplicasReset",
                    f"{action.target}: spec.replicas was set to {found}, but role {role} has scaling.mode Static, so "
                    f"the operator set it to {wanted} again. Change roles[].replicas of the pool, or set scaling.mode "
                    "to External",
                )


def named(targets: list[str]) -> str:
    """Return the first targets as text, and the number of the others."""
    more = len(targets) - _MAX_NAMED
    return ", ".join(targets[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_restored(ctx: PlanContext, done: Done) -> bool:
    if not done.is_created or not isinstance(done.action, ApplyObject):
        return False
    place = place_of(done.action.manifest)
    return place in ctx.memory.applied or place[0] == "ControllerRevision"


def _reset_number(ctx: PlanContext, action: ApplyObject) -> int | None:
    """Return the number of replicas that another writer set on a role's scaler without owning the field, as a write of
    0 to the subresource /scale does; `None` if there was no such write."""
    manifest = action.manifest
    if manifest["kind"] != "PoolRoleScaler" or "replicas" not in manifest["spec"]:
        return None
    facts = ctx.facts.scalers.get(manifest["spec"]["role"])
    applied = ctx.memory.applied.get(place_of(manifest))
    if facts is None or applied is None or applied.digest != digest_of(manifest):
        return None
    return None if facts.replicas == manifest["spec"]["replicas"] else facts.replicas
