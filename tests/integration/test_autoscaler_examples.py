"""The autoscaler examples name metrics that a real worker and a real gateway export, with labels that they have."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness.servers.processes import a_worker, running
from prometheus_client.parser import text_string_to_metric_families

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
TARGET_LABELS = {"kvferry_dev_pool", "kvferry_dev_role", "namespace"}
"""Labels that Prometheus adds to what it scrapes through the pool's PodMonitor."""
ENGINE = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--threads", "1", "--load-policy", "always")
PORTS = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
_SELECTOR = re.compile(r"\b(kvferry_(?!dev_)[a-z_]+)\{([^}]*)\}")


def example(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / name).read_text("utf-8")))


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Return the metrics of a query with the names of the labels that select their series."""
    return [(name, set(re.findall(r"(\w+) *[!=]", matchers))) for name, matchers in _SELECTOR.findall(query)]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names of all series of a worker's and a gateway's page, with the names of their labels."""
    with a_worker("both", "--metrics", "127.0.0.1:0") as worker, running("up", *ENGINE, "--json", *PORTS) as stack:
        addresses = [worker.wait_for("listening")["metrics"], stack.wait_for("ready")["admin"]]
        pages = [httpx.get(f"http://{address}/metrics", timeout=30).text for address in addresses]
        assert stack.stop() == 0
    families = [family for page in pages for family in text_string_to_metric_families(page)]
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_query_of_keda_selects_exported_series(exported: dict[str, set[str]]) -> None:
    (trigger,) = example("keda.yaml")["spec"]["triggers"]
    found = selectors(trigger["metadata"]["query"])
    assert [name for name, _ in found] == ["kvferry_worker_running", "kvferry_gateway_held_requests"]
    for name, labels in found:
        assert labels <= exported[name] | TARGET_LABELS, name


def test_the_rule_of_the_adapter_serves_the_metric_of_the_hpa_from_exported_series(
    exported: dict[str, set[str]],
) -> None:
    (source,) = example("hpa.yaml")["spec"]["metrics"]
    (rule,) = example("prometheus-adapter.yaml")["externalRules"]
    metric = source["external"]["metric"]
    ((name, labels),) = selectors(rule["seriesQuery"])
    assert metric["name"] == name
    assert labels | set(metric["selector"]["matchLabels"]) <= exported[name] | TARGET_LABELS
    assert set(rule["resources"]["overrides"]) <= TARGET_LABELS
