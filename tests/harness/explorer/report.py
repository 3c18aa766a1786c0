"""Generates the explorer's tables for the docs."""

from harness.explorer.mutations import MUTATIONS
from harness.explorer.scenario import SCENARIOS


def scenarios() -> str:
    """Return a Markdown table of all scenarios."""
    lines = ["| scenario | description | faults per run | kinds of faults |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [f"| {s.name} | {s.about} | {s.faults} | {', '.join(sorted(s.kinds))} |" for s in SCENARIOS]
    return "\n".join(lines) + "\n"


def mutations() -> str:
    """Return a Markdown table of all mutations."""
    lines = ["| broken rule | class of bug | public issue | detected in |", "| --- | --- | --- | --- |"]
    lines += [f"| {m.name} | {m.stands_for} | {m.seen} | {m.scenario} |" for m in MUTATIONS]
    return "\n".join(lines) + "\n"
