"""The explorer's tables for the docs, from the code that they describe."""

from kvferry.testing.explorer.mutations import MUTATIONS
from kvferry.testing.explorer.scenario import SCENARIOS


def scenarios() -> str:
    """Every scenario, as a Markdown table."""
    lines = ["| scenario | what happens beside the request's own way | faults in one run | of kinds |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [f"| {s.name} | {s.about} | {s.faults} | {', '.join(sorted(s.kinds))} |" for s in SCENARIOS]
    return "\n".join(lines) + "\n"


def mutations() -> str:
    """Every mutation, as a Markdown table."""
    lines = ["| broken rule | class of bug | met in public | noticed in |", "| --- | --- | --- | --- |"]
    lines += [f"| {m.name} | {m.stands_for} | {m.seen} | {m.scenario} |" for m in MUTATIONS]
    return "\n".join(lines) + "\n"
