"""Each query of the chart's dashboards and alerts names metrics of the table, with labels and values that they have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.core.metrics import all_metrics
from kvferry.core.metrics.metric import Metric, MetricKind
from kvferry.gateway.http.openapi.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/kvferry"
DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
TABLE = {metric.name: metric for metric in all_metrics.ALL}
TARGET_LABELS = {"kvferry_dev_pool", "kvferry_dev_role", "namespace", "pod"}
"""Labels that Prometheus adds from the pods' labels, as the chart's monitors configure."""
SUFFIXES = {"_bucket": {"le"}, "_sum": set(), "_count": set()}
_NAME = re.compile(r"\b(?:kvferry_(?!dev_)|vllm:)[a-z0-9_]+")
_GROUPS = re.compile(r"\b(?:by|without) *\(([^)]*)\)")
_SELECTORS = re.compile(r"\b([a-z_:0-9]*){([^}]*)}")
_MATCHER = re.compile(r'\s*([a-z_]+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*')


def queries_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield value["expr"]
        for item in value.values():
            yield from queries_of(item)
    if isinstance(value, list):
        for item in value:
            yield from queries_of(item)


QUERIES = [(path.name, query) for path in DASHBOARDS for query in queries_of(json.loads(path.read_text("utf-8")))]
for alerts in sorted((CHART / "files/alerts").glob("*.yaml")):
    QUERIES += [(alerts.name, query) for query in queries_of(yaml.safe_load(alerts.read_text("utf-8")))]
keda = yaml.safe_load((ROOT / "docs/examples/keda.yaml").read_text("utf-8"))
QUERIES += [("keda.yaml", trigger["metadata"]["query"]) for trigger in keda["spec"]["triggers"]]


def problems(query: str) -> list[str]:
    """Return the errors of a query: unknown metrics, unknown labels, rates of gauges."""
    found: list[str] = []
    labels = set(TARGET_LABELS)
    names = _NAME.findall(query)
    if not names:
        found.append("no metric")
    for name in names:
        suffix = next((end for end in SUFFIXES if name.endswith(end) and name not in TABLE), "")
        metric = TABLE.get(name.removesuffix(suffix))
        if metric is None or (suffix and metric.kind is not MetricKind.HISTOGRAM):
            found.append(f"unknown metric {name}")
            continue
        if metric.kind is MetricKind.HISTOGRAM and not suffix:
            found.append(f"{name} is a histogram; its series have suffixes")
        if f"rate({name}" in query and metric.kind is MetricKind.GAUGE:
            found.append(f"rate of the gauge {name}")
        labels |= {*metric.labels, *SUFFIXES.get(suffix, ())}
    used = {label.strip() for group in _GROUPS.findall(query) for label in group.split(",")}
    for name, selector in _SELECTORS.findall(query):
        matchers = _MATCHER.findall(selector)
        used |= {label for label, _, _ in matchers}
        metric = TABLE.get(name) or TABLE.get(re.sub(r"_(bucket|sum|count)$", "", name))
        if metric is not None:
            found += [problem for matcher in matchers for problem in problems_of_matcher(metric, *matcher)]
    return found + [f"unknown label {label}" for label in sorted(used - labels)]


def problems_of_matcher(metric: Metric, label: str, operator: str, text: str) -> list[str]:
    """Return the values of a matcher that the metric never has. An alternation is checked part by part."""
    if label not in metric.labels:
        return []
    values = PATHS if label == "path" else metric.values.get(label)
    if values is None:
        return [f"label {label} of {metric.name} has no closed set of values; add it to the table"]
    parts = text.split("|") if "~" in operator else [re.escape(text)]
    return [
        f"{metric.name} never has {label} {part}"
        for part in parts
        if not any(re.fullmatch(part, value) for value in values)
    ]


PATHS = ("other", *(operation.path for operation in OPERATIONS))
"""Values of the label `path`, which the table of metrics does not know."""


def test_the_dashboards_have_queries() -> None:
    assert len(DASHBOARDS) >= 1
    assert len(QUERIES) > 10


@pytest.mark.parametrize(("file", "query"), QUERIES, ids=[f"{file}-{n}" for n, (file, _) in enumerate(QUERIES)])
def test_a_query_names_metrics_and_labels_that_exist(file: str, query: str) -> None:
    assert problems(query) == [], f"{file}: {query}"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(rate(kvferry_gateway_request_total[5m]))", "unknown metric"),
        ("sum by (state) (rate(kvferry_gateway_requests_total[5m]))", "unknown label state"),
        ('sum(rate(kvferry_gateway_requests_total{code="200"}[5m]))', "unknown label code"),
        ("rate(kvferry_gateway_streams_open[5m])", "rate of the gauge"),
        ("rate(kvferry_gateway_requests_total_bucket[5m])", "unknown metric"),
        ("kvferry_gateway_handoff_seconds", "histogram"),
        ('rate(kvferry_gateway_handoffs_total{outcome="lost"}[5m])', "never has outcome lost"),
        ('rate(kvferry_gateway_handoffs_total{outcome=~"failed|lost"}[5m])', "never has outcome lost"),
        ('rate(kvferry_gateway_requests_total{status=~"6.."}[5m])', "never has status 6.."),
        ('rate(kvferry_gateway_requests_total{path!~"/healthz"}[5m])', "never has path /healthz"),
        ('rate(kvferry_gateway_tenant_requests_total{tenant="a"}[5m])', "no closed set of values"),
        ("up", "no metric"),
    ],
)
def test_wrong_queries_are_found(query: str, problem: str) -> None:
    assert any(problem in found for found in problems(query))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_each_panel_says_what_it_shows_and_takes_the_selected_pools(path: Path) -> None:
    dashboard = json.loads(path.read_text("utf-8"))
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert all(variables[name]["allValue"] == ".*" for name in ("namespace", "pool")), "series without labels count too"
    places = set()
    for panel in dashboard["panels"]:
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        places.add((place["x"], place["y"]))
        for query in queries_of(panel):
            assert "kvferry_operator_" in query or 'namespace=~"$namespace",kvferry_dev_pool=~"$pool"' in query
    assert len(places) == len(dashboard["panels"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_each_alerted_metric_of_pools_has_a_panel() -> None:
    shown = {name for file, query in QUERIES if file.endswith(".json") for name in _NAME.findall(query)}
    alerted = {name for file, query in QUERIES if file == "kvferry.yaml" for name in _NAME.findall(query)}
    of_pools = {name for name in alerted if not name.startswith(("kvferry_operator_", "kvferry_tls_"))}
    assert of_pools - shown == set()
