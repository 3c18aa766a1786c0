"""Each diagram of the documents keeps its form: mermaid statements parse, and boxes of lines are closed."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_STATE = r"(?:\[\*\]|\w+)"
_NODE = r"\w+(?:\[[^\]]+\]|\([^)]+\)|\{[^}]+\})?"
_LINK = r"(?:-->|---|-\.->|-- [^-]+ -->|-\. [^.]+ \.->)"
STATEMENTS: Mapping[str, re.Pattern[str]] = {
    "sequenceDiagram": re.compile(
        r"participant \w+( as [^:]+)?|\w+(?:->>|-->>|-\)|--\)|-x|--x)\w+: (?:(?!-?->>)[^;])+"
        r"|Note (over \w+(,\w+)?|(left|right) of \w+): (?:(?!-?->>)[^;])+|loop .+|alt .+|else.*|opt .+|par .+|end"
    ),
    "stateDiagram-v2": re.compile(rf"{_STATE} --> {_STATE}(: [^>]+)?|state .+"),
    "flowchart LR": re.compile(rf"{_NODE}( {_LINK} {_NODE})+|{_NODE}"),
}
_DOWN, _UP = "┌┐┬├┤┼│▲", "└┘┴├┤┼│▼"
_BESIDE = "◄►"


def diagrams() -> Iterator[tuple[str, str, str]]:
    """Yield place, language and text of each fenced block that is a mermaid diagram or has lines of boxes."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for fence in _FENCE.finditer(text):
            if fence[1] == "mermaid" or re.search("[┌└]", fence[2]):
                line = text.count("\n", 0, fence.start()) + 1
                yield f"{page.relative_to(ROOT)}:{line}", fence[1], fence[2]


def problems(language: str, text: str) -> list[str]:
    """Return what is wrong with a diagram."""
    return statement_problems(text) if language == "mermaid" else box_problems(text)


def statement_problems(text: str) -> list[str]:
    head, *lines = text.rstrip().splitlines()
    if head not in STATEMENTS:
        return [f"{head[:60]!r} is no kind of diagram"]
    found = [f"{line.strip()!r} is no statement" for line in lines if not STATEMENTS[head].fullmatch(line.strip())]
    if not lines:
        found.append("no statements")
    named = set(re.findall(r"^\s*participant (\w+)", text, re.MULTILINE))
    if head == "sequenceDiagram":
        used = {side for pair in re.findall(r"^\s*(\w+)-?->>(\w+):", text, re.MULTILINE) for side in pair}
        found += [f"{one} is no participant" for one in sorted(used - named)]
    return found


def box_problems(text: str) -> list[str]:
    rows = text.splitlines()
    tree = not re.search("[┐┘]", text)  # a tree of names has no closed boxes

    def at(row: int, column: int) -> str:
        return rows[row][column] if 0 <= row < len(rows) and column < len(rows[row]) else " "

    found = []
    for number, row in enumerate(rows):
        for column, mark in enumerate(row):
            if mark in "┌┐" and at(number + 1, column) not in _UP + _BESIDE:
                found.append(f"line {number + 1}: nothing continues {mark} below")
            if mark in "└┘" and at(number - 1, column) not in _DOWN + _BESIDE and not tree:
                found.append(f"line {number + 1}: nothing continues {mark} above")
    return found


DIAGRAMS = list(diagrams())


def test_there_are_diagrams() -> None:
    assert len(DIAGRAMS) > 15


@pytest.mark.parametrize(("place", "language", "text"), DIAGRAMS, ids=[place for place, _, _ in DIAGRAMS])
def test_a_diagram_keeps_its_form(place: str, language: str, text: str) -> None:
    assert problems(language, text) == [], place


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("mermaid", "sequenceDiagram participant G as gateway G->>D: a\n", "is no kind of diagram"),
        ("mermaid", "sequenceDiagram\n    participant D\n    D->>D: one D->>D: two\n", "is no statement"),
        ("mermaid", "sequenceDiagram\n    participant D\n    D->>P: page\n", "P is no participant"),
        ("mermaid", "sequenceDiagram\n    participant D\n    Note over D: a; b\n", "is no statement"),
        ("mermaid", "stateDiagram-v2\n    a --> b: go c --> d: go\n", "is no statement"),
        ("text", "┌───┐\n │ a │\n└───┘\n", "nothing continues ┌ below"),
        ("text", "┌───┐\n│ a │\n └───┘\n", "nothing continues ┘ above"),
    ],
)
def test_wrong_diagrams_are_found(language: str, text: str, problem: str) -> None:
    assert any(problem in found for found in problems(language, text))


def test_no_list_of_a_docstring_or_page_was_joined_to_its_line() -> None:
    """A bullet after a full stop within a line was a line of its own."""
    files = [
        *PAGES,
        *(path for folder in ("services", "operator", "kernels") for path in (ROOT / folder).rglob("*.py")),
    ]
    joined = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.match(r"^[^|#\"']*[a-z)`]\. - [A-Z`]", line)
    ]
    assert joined == []
