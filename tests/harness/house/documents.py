"""Finds the runnable code blocks of README and docs: blocks fenced as `sh` or `python`, with an optional mark before
them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.commit import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"(<!-- test: (\w+) -->\n)?^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fence:
    """A runnable code block of a document."""

    document: str
    line: int
    mark: str
    """How the block is run: `serve` starts the stack that other blocks use; `node` needs a cluster with a node;
    `cluster` needs an operator; empty runs the block directly."""
    language: str
    code: str


def fences(documents: Iterable[Path] = DOCUMENTS) -> list[Fence]:
    """Return all runnable code blocks, in order."""
    found = []
    for path in documents:
        text = path.read_text("utf-8")
        found += [
            Fence(str(path.relative_to(ROOT)), text.count("\n", 0, m.start()) + 1, m[2] or "", m[3], m[4])
            for m in _FENCE.finditer(text)
        ]
    return found
