"""Enumerates the next actions of a world: ordinary actions and injected faults."""

import math

from harness.explorer.network import CONTROL, REPEATED
from harness.explorer.world import Action, World


def choices(world: World) -> list[Action]:
    """Return all actions that are possible next, including faults."""
    return [*ordinary(world), *faults(world)]


def ordinary(world: World) -> list[Action]:
    """Return all actions that are possible next without a fault.

    Messages are delivered in any order. Time may pass only if all remaining actions are marked late, which is a fault.
    """
    found: list[Action] = []
    must = False
    for message in dict.fromkeys(world.messages):
        # Without a decode worker the gateway starts no stream, but waits for the first decode worker.
        waits = message.kind == "decode" and message.to not in world.actors and not world.can_serve(message.to)
        if message.to not in world.frozen and not waits:
            found.append(("deliver", message))
            must = must or not message.late
    for name, actor in world.actors.items():
        if name not in world.frozen:
            tasks = actor.tasks()
            found += [("do", name, what, key) for what, key in tasks]
            must = must or bool(tasks)
    for name, number, read in world.reads():
        if read.wants_epochs:
            found.append(("epochs", name, number, ""))
            must = True
        elif not read.is_over:
            found.append(("land", name, number))
            must = must or not read.late
    if len(world.started) < len(world.scenario.requests) and "G" in world.actors:
        found.append(("start", len(world.started)))
    found += [("restart", name) for name in world.lives if name not in world.actors]
    found += [("thaw", name) for name in world.frozen]
    if not must and world.due < math.inf:
        found.append(("time",))
    return found


def faults(world: World) -> list[Action]:
    """Return all faults that can be injected next; empty if the scenario's number of faults has been reached."""
    if not world.faults:
        return []
    kinds = world.scenario.kinds
    return [a for a in (*_on_messages(world), *_on_reads(world), *_on_actors(world)) if a[-1] in kinds or a[0] in kinds]


def _on_messages(world: World) -> list[Action]:
    found: list[Action] = []
    for message in dict.fromkeys(world.messages):
        if message.kind in CONTROL and message.to in world.actors:
            found.append(("drop", message))
            if not message.late:
                found.append(("delay", message))
            if message.kind in REPEATED:
                found.append(("dup", message))
        elif message.kind == "decode" and message.body[1] is not None:
            found.append(("swap", message))
    return found


def _on_reads(world: World) -> list[Action]:
    found: list[Action] = []
    for name, number, read in world.reads():
        if read.wants_epochs:
            found += [("epochs", name, number, kind) for kind in ("lose", "short")]
        elif not read.is_over and not read.late:
            found += [("stall", name, number), ("flip", name, number)]
    return found


def _on_actors(world: World) -> list[Action]:
    found: list[Action] = []
    for name in world.actors:
        if "gateway" not in world.scenario.kinds or name == "G":
            found.append(("crash", name))
        if name != "G" and name not in world.frozen:
            found.append(("freeze", name))
    gateway = world.actors.get("G")
    if gateway is not None:
        # If all requests are identical, it is sufficient to inject faults into one of them.
        keys = [key for key in gateway.runs if key == 0 or world.scenario.readers > 1 or world.scenario.is_large]
        found += [(kind, key) for key in keys for kind in ("cut", "cancel")]
    return found
