"""Each metric that a document, an example, the chart or a test of a cluster names is exported."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvferry.core.metrics import all_metrics
from kvferry.core.metrics.metric import MetricKind

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "charts", "tests/cluster", "tests/harness/kube", "tests/harness/pools", "operator")
SUFFIXES = {".md", ".yaml", ".json", ".py", ".txt", ".tpl"}
PAGES = [
    *(
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES and ROOT / "docs/changes" not in path.parents
    ),
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
]
TABLE = {metric.name: metric for metric in all_metrics.ALL}
TARGET_LABELS = {"kvferry_dev_pool", "kvferry_dev_role"}
"""Labels that Prometheus adds from the labels of pods."""
_NAME = re.compile(r"(?<![\w.])((?:kvferry_|vllm:)[a-z0-9_]+)(?!\w)")
_FAMILY = re.compile(r"(?<![\w.])(kvferry_[a-z0-9_]*|vllm:[a-z0-9_]*)\*")
_ENDING = re.compile(r"`\.\.\.(_[a-z0-9_]+)`")


def is_exported(name: str) -> bool:
    """Return whether a name is that of a metric, of a histogram's series, or the start of several names."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    known = TABLE.get(name) or TABLE.get(base)
    if known is None:
        return False
    return name in TABLE or known.kind is MetricKind.HISTOGRAM


def unknown(text: str) -> Iterator[str]:
    """Yield the names in a text that belong to no metric."""
    families = set(_FAMILY.findall(text))
    for name in sorted(set(_NAME.findall(text)) - families):
        if not is_exported(name) and name not in TARGET_LABELS:
            yield name
    for start in sorted(families):
        if not any(name.startswith(start) for name in TABLE):
            yield f"{start}*"
    for end in sorted(set(_ENDING.findall(text))):
        if not any(name.endswith(end) for name in TABLE):
            yield f"...{end}"


def test_the_pages_name_metrics() -> None:
    named = {name for page in PAGES for name in _NAME.findall(page.read_text("utf-8")) if is_exported(name)}
    assert len(named) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_exported_metrics_only(page: Path) -> None:
    assert list(unknown(page.read_text("utf-8"))) == []


def test_the_metric_of_the_hpa_has_labels_of_a_scraped_worker() -> None:
    hpa = yaml.safe_load((ROOT / "docs/examples/hpa.yaml").read_text("utf-8"))
    for source in hpa["spec"]["metrics"]:
        metric = source["external"]["metric"]
        assert metric["name"] in TABLE
        labels = set(metric["selector"]["matchLabels"])
        assert labels <= TARGET_LABELS | set(TABLE[metric["name"]].labels)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`kvferry_requests_held`", ["kvferry_requests_held"]),
        ("sum(vllm:num_requests_wating)", ["vllm:num_requests_wating"]),
        ("`kvferry_tears_*`", ["kvferry_tears_*"]),
        ("`..._hit_tokns_total`", ["..._hit_tokns_total"]),
        ("kvferry_gateway_streams_open_bucket", ["kvferry_gateway_streams_open_bucket"]),
        ("kvferry_gateway_queue_seconds_bucket, kvferry_tier_*, `..._hit_tokens_total`, kvferry_dev_pool", []),
    ],
)
def test_wrong_names_are_found(text: str, found: list[str]) -> None:
    assert list(unknown(text)) == found
