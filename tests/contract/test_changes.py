"""Fragments of changes and the changelog have the forms that CONTRIBUTING.md states."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRAGMENTS = sorted((ROOT / "docs/changes").glob("*"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
AREAS = ["Gateway and API", "Engine", "KV and hand-off", "Kubernetes", "Models", "Tools"]


def test_fragments_have_a_topic_and_a_kind() -> None:
    wrong = [f.name for f in FRAGMENTS if not re.fullmatch(r"[a-z0-9_-]+\.(added|changed|fixed|removed)\.md", f.name)]
    assert wrong == []


def test_fragments_are_short() -> None:
    assert [f.name for f in FRAGMENTS if len(f.read_text("utf-8")) > 700] == []


def test_fragments_are_not_those_of_the_version_that_is_folded() -> None:
    """Once a version's page exists, a fragment tells what has changed since; it begins no list of features."""
    assert len(FRAGMENTS) < 100, "fold the fragments into CHANGELOG.md"


def test_the_page_of_a_version_has_the_areas() -> None:
    pages = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    assert pages[0].startswith("0.1.0 (unreleased)\n")
    for page in pages:
        assert re.findall(r"^### (.+)$", page, re.MULTILINE) == AREAS


def test_entries_are_short() -> None:
    entries = re.split(r"^- ", CHANGELOG, flags=re.MULTILINE)[1:]
    assert len(entries) > 30
    assert [entry[:60] for entry in entries if len(entry.split("\n\n")[0]) > 360] == []
