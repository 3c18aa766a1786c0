"""Breadth-first search over all states of a scenario, and random walks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.explorer.choices import choices, faults, ordinary
from harness.explorer.parts import Parts
from harness.explorer.scenario import Scenario
from harness.explorer.violation import Violation
from harness.explorer.world import Action, World, label

_FAULT_SHARE = 0.1

Progress = Callable[[int, int, int], None]
"""Progress callback; arguments: depth, number of states seen, number of states in the queue."""


@dataclass(slots=True)
class Found:
    """Result of a search."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    is_complete: bool = True
    violation: str | None = None
    seed: int | None = None
    """Seed of the walk that failed; `None` for an exhaustive search."""
    trace: list[Action] = field(default_factory=list)


def explore(scenario: Scenario, parts: Parts, *, max_states: int, progress: Progress | None = None) -> Found:
    """Search all reachable states breadth-first, so that the first failing trace has minimal length."""
    first = World(scenario, parts)
    start = first.fingerprint()
    came: dict[int, tuple[int, Action] | None] = {start: None}
    layer: list[tuple[int, World]] = [(start, first)]
    found = Found(states=1)
    while layer:
        following: list[tuple[int, World]] = []
        while layer:
            here, world = layer.pop()
            for action in choices(world):
                child = world.clone()
                found.steps += 1
                try:
                    child.apply(action)
                except Violation as error:
                    found.violation, found.trace = str(error), [*_trace(came, here), action]
                    found.is_complete = False
                    return found
                there = child.fingerprint()
                if there in came:
                    continue
                came[there] = (here, action)
                found.states += 1
                following.append((there, child))
            if found.states >= max_states:
                found.is_complete = False
                return found
        layer = following
        found.depth += bool(layer)
        if progress is not None:
            progress(found.depth, found.states, len(layer))
    return found


def walk(scenario: Scenario, parts: Parts, *, seed: int, walks: int, max_steps: int = 400) -> Found:
    """Run random walks to their end; stop at the first violation and return its unshortened trace."""
    found = Found()
    for number in range(walks):
        draw = random.Random(seed + number)  # seeded, so that the walk is reproducible
        world, trace = World(scenario, parts), list[Action]()
        while len(trace) < max_steps:
            spends = draw.random() < _FAULT_SHARE  # rarely; otherwise all faults would be injected at the start
            actions = (spends and faults(world)) or ordinary(world) or faults(world)
            if not actions:
                break
            action = draw.choice(actions)
            trace.append(action)
            found.steps += 1
            world = world.clone()
            try:
                world.apply(action)
            except Violation as error:
                found.violation, found.trace, found.is_complete = str(error), trace, False
                found.seed = seed + number
                return found
        found.states += 1
        found.depth = max(found.depth, len(trace))
    return found


def replay(scenario: Scenario, parts: Parts, labels: Sequence[str]) -> Found:
    """Run the actions with these labels in order, skipping impossible ones, and return the result."""
    world, found = World(scenario, parts), Found(is_complete=False)
    for wanted in labels:
        action = next((a for a in choices(world) if label(a) == wanted), None)
        if action is None:
            continue
        found.trace.append(action)
        found.steps += 1
        try:
            world.apply(action)
        except Violation as error:
            found.violation = str(error)
            return found
    return found


def _trace(came: dict[int, tuple[int, Action] | None], state: int) -> list[Action]:
    trace: list[Action] = []
    step = came[state]
    while step is not None:
        trace.append(step[1])
        step = came[step[0]]
    return trace[::-1]
