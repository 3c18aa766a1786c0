"""A shorter trace that still fails: actions are left out as long as something fails without them."""

from kvferry.testing.explorer.parts import Parts
from kvferry.testing.explorer.scenario import Scenario
from kvferry.testing.explorer.search import Found, replay
from kvferry.testing.explorer.world import label


def shrink(scenario: Scenario, parts: Parts, found: Found) -> Found:
    """The same search result with a trace from which no one action can be left out."""
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
