"""Shortens a failing trace by removing actions while it still fails."""

from harness.explorer.parts import Parts
from harness.explorer.scenario import Scenario
from harness.explorer.search import Found, replay
from harness.explorer.world import label


def shrink(scenario: Scenario, parts: Parts, found: Found) -> Found:
    """Remove actions from a failing trace until removing any single action makes it pass; return the result."""
    best, size = found, max(1, len(found.trace) // 2)
    while True:
        labels = [label(action) for action in best.trace]
        start = 0
        shorter: Found | None = None
        while start < len(labels) and shorter is None:
            tried = replay(scenario, parts, [*labels[:start], *labels[start + size :]])
            if tried.violation is not None and len(tried.trace) < len(best.trace):
                shorter = tried
            start += size
        if shorter is not None:
            best = shorter
            size = min(size, max(1, len(best.trace) // 2))
        elif size == 1:
            return best
        else:
            size //= 2
