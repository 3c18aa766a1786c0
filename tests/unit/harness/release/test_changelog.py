"""Fragments fold into a section of CHANGELOG.md, by area."""

import pytest
from harness.release.changelog import AREAS, Fragment, area_of, fold, parse, section

HEAD = "# Changelog\n\nText.\n"
OPEN = HEAD + "\n## 0.1.0 (unreleased)\n\n" + "\n\n".join(f"### {area}\n\n- Old entry." for area in AREAS) + "\n"


def test_a_fragment_has_a_topic_and_a_kind() -> None:
    assert parse("a-b.added.md", "One\ntwo.\n") == Fragment("a-b.added.md", "added", "One two.")
    with pytest.raises(ValueError, match=r"TOPIC\.KIND\.md, with a KIND of added"):
        parse("a.news.md", "")


def test_the_first_section_keeps_its_entries_and_takes_what_was_added() -> None:
    fragments = [parse("a.added.md", "Pools have a chart."), parse("b.fixed.md", "A fault nobody had.")]
    folded = fold(OPEN, fragments, "0.1.0", "2026-11-28")
    assert "## 0.1.0 (2026-11-28)" in folded
    assert "unreleased" not in folded
    assert folded.count("- Old entry.") == len(AREAS)
    assert "### Kubernetes\n\n- Old entry.\n- Pools have a chart." in folded
    assert "nobody had" not in folded


def test_a_later_section_takes_all_kinds_above_the_older_one() -> None:
    first = fold(OPEN, [], "0.1.0", "2026-11-28")
    folded = fold(first, [parse("b.fixed.md", "Tiers no longer stop.")], "0.2.0", "2027-01-01")
    assert folded.index("## 0.2.0 (2027-01-01)") < folded.index("## 0.1.0 (2026-11-28)")
    assert "### KV and hand-off\n\n- Fixed: Tiers no longer stop.\n" in folded
    assert section(folded, "0.1.0") == section(first, "0.1.0")


def test_a_version_with_a_date_is_not_folded_again() -> None:
    with pytest.raises(ValueError, match=r"raise the version in pyproject\.toml"):
        fold(fold(OPEN, [], "0.1.0", "2026-11-28"), [], "0.1.0", "2026-11-29")


def test_long_entries_are_wrapped() -> None:
    folded = fold(OPEN, [parse("a.added.md", "word " * 60)], "0.1.0", "2026-11-28")
    assert max(map(len, folded.splitlines())) <= 120
    assert "\n  word" in folded


def test_an_entry_belongs_to_the_area_of_most_of_its_words() -> None:
    assert area_of("The operator restarts pods of a pool with a model.") == "Kubernetes"
    assert area_of("/v1/messages") == "Gateway and API"


def test_links_lead_to_the_pages_from_the_changelog() -> None:
    assert parse("a.added.md", "See [pages](../pages.md) and [grpc](../grpc.md#go).\n").text == (
        "See [pages](docs/pages.md) and [grpc](docs/grpc.md#go)."
    )
