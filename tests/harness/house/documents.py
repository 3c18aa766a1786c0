"""Finds the runnable code blocks of README and docs: blocks fenced as `sh` or `python`, with an optional comment before
them.

    <!-- test: MARK expect "PATTERN" "PATTERN" -->

The mark says how the block is run; each pattern is a regular expression that its output has to match. Both are
optional.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.commit import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"(?:<!-- test: ([^\n]+) -->\n)?^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fence:
    """A runnable code block of a document."""

    document: str
    line: int
    mark: str
    """How the block is run: `serve` starts the stack that other blocks use; `node` needs a cluster with a node;
    `cluster` needs an operator; empty runs the block directly."""
    expected: tuple[str, ...]
    """Patterns of its output."""
    language: str
    code: str


def fences(documents: Iterable[Path] = DOCUMENTS) -> list[Fence]:
    """Return all runnable code blocks, in order."""
    found = []
    for path in documents:
        text = path.read_text("utf-8")
        found += [
            Fence(str(path.relative_to(ROOT)), text.count("\n", 0, m.start()) + 1, *_marks(m[1] or ""), m[2], m[3])
            for m in _FENCE.finditer(text)
        ]
    return found


def _marks(comment: str) -> tuple[str, tuple[str, ...]]:
    """Return the mark and the patterns of a comment."""
    mark, _, patterns = (f" {comment}" if comment else "").partition(" expect ")
    if not re.fullmatch(r"( \w+)?", mark) or (patterns and not re.fullmatch(r'"[^"]+"( "[^"]+")*', patterns)):
        raise ValueError(f"<!-- test: {comment} --> must be a mark, `expect` with patterns in quotes, or both")
    return mark.strip(), tuple(re.findall(r'"([^"]+)"', patterns))
