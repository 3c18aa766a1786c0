"""The list of public names is complete, and a class name means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from harness.house import golden, public_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "public-api.md"
SHARED_WORDS = {"Completion", "Embedding"}
"""Results of both Python APIs, `kvferry.client` and `kvferry.engine`, which have the same words for the same things."""


def test_the_page_lists_the_public_names() -> None:
    assert golden.documents()[PAGE] == PAGE.read_text("utf-8"), "run `make golden` and review the diff"


@pytest.mark.parametrize("part", sorted(public_names.parts()))
def test_a_part_of_the_list_is_on_the_page_and_not_empty(part: str) -> None:
    assert f"<!-- generated: {part} -->" in PAGE.read_text("utf-8")
    assert len(public_names.parts()[part].splitlines()) > 3


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("public-python", "kvferry.engine.LLM("),
        ("public-python", "kvferry.client.AsyncClient("),
        ("public-commands", "kvferry bench serve "),
        ("public-commands", "kvferry explain REQUEST_ID"),
        ("public-routes", "POST /v1/chat/completions"),
        ("public-routes", "admin: GET /fleet"),
        ("public-calls", "kvferry.v1.Inference/Generate"),
        ("public-reasons", "OVERLOADED RESOURCE_EXHAUSTED 429"),
        ("public-metrics", "kvferry_gateway_handoffs_total counter outcome"),
        ("public-objects", "InferencePool v1alpha1 spec.model.name"),
        ("public-objects", "label kvferry.dev/pool"),
        ("public-values", "image.tag"),
        ("public-variables", "KVFERRY_TICKET_KEY"),
    ],
)
def test_names_that_scripts_rely_on_are_listed(part: str, name: str) -> None:
    assert name in public_names.parts()[part]


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for room in ("services", "operator"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_WORDS}
    assert not twice, f"one name for several classes: {twice}"
    assert all(len(places[name]) == 2 for name in SHARED_WORDS)
