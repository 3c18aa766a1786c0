"""The runnable blocks of README and docs: what is fenced as `sh` or `python`, and the mark before it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.commit import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"(<!-- test: (\w+) -->\n)?^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fence:
    """One runnable block of a document."""

    document: str
    line: int
    mark: str
    """`serve` starts the stack that others use; `node` is run on a cluster's node, `cluster` beside an operator; empty:
    run as it stands."""
    language: str
    code: str


def fences(documents: Iterable[Path] = DOCUMENTS) -> list[Fence]:
    """All of them, in order."""
    found = []
    for path in documents:
        text = path.read_text("utf-8")
        found += [
            Fence(str(path.relative_to(ROOT)), text.count("\n", 0, m.start()) + 1, m[2] or "", m[3], m[4])
            for m in _FENCE.finditer(text)
        ]
    return found
