"""The chart's dashboards and alert rules on a real Prometheus that scrapes a running stack and a worker."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness.prometheus.server import Prometheus, Target, running_prometheus
from harness.servers.processes import a_worker, running

CHART = Path(__file__).resolve().parents[2] / "charts/kvferry/files"
ALERTS = CHART / "alerts/kvferry.yaml"
ENGINE = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--threads", "1", "--load-policy", "always")
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
LABELS = {"kvferry_dev_pool": "chat", "namespace": "ns"}
PROMPT = "many words that fill several blocks of the cache " * 4
NOT_HERE = ("kvferry_operator_", "kvferry_gateway_retries_total")
"""Prefixes of metrics without series in this stack, which has no operator and no failed attempts."""

pytestmark = pytest.mark.long


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield value["expr"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from expressions(item)


def without_variables(query: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$pool", "chat")


@dataclass(frozen=True)
class Scraped:
    """A Prometheus that scrapes a running stack."""

    prometheus: Prometheus
    complete: Callable[[], None]
    """Sends a request to the stack."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        running("up", *ENGINE, "--json", *ADDRESSES) as stack,
        a_worker("both", "--metrics", "127.0.0.1:0") as worker,
    ):
        ready, listening = stack.wait_for("ready"), worker.wait_for("listening")
        targets = [
            Target(str(ready["admin"]), {**LABELS, "kvferry_dev_role": "gateway"}),
            Target(str(listening["metrics"]), {**LABELS, "kvferry_dev_role": "both"}),
        ]
        numbers = itertools.count()

        def complete() -> None:
            body = {"prompt": f"{next(numbers)} {PROMPT}", "max_tokens": 24, "ignore_eos": True}
            answer = httpx.post(f"http://{ready['http']}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text

        with running_prometheus(folder, targets, [ALERTS]) as server:
            server.wait_for("count(up == 1) == 2")
            yield Scraped(server, complete)
        assert stack.stop() == 0


def test_each_query_of_the_dashboards_has_data(scraped: Scraped) -> None:
    queries = [q for path in (CHART / "dashboards").glob("*.json") for q in expressions(json.loads(path.read_text()))]
    assert len(queries) > 10
    for query in map(without_variables, queries):
        if any(name in query for name in NOT_HERE):
            assert scraped.prometheus.query(query) == []
        else:
            scraped.prometheus.wait_for(query, act=scraped.complete)


def test_each_rule_is_evaluated_and_none_fires(scraped: Scraped) -> None:
    rules = [rule for group in scraped.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [
        rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    assert {(rule["health"], rule["state"]) for rule in rules} == {("ok", "inactive")}


def test_a_query_that_is_wrong_fails(scraped: Scraped) -> None:
    with pytest.raises(AssertionError, match="bad_data"):
        scraped.prometheus.query("sum(rate(kvferry_gateway_requests_total))")
    assert scraped.prometheus.query('sum(rate(kvferry_gateway_requests_total{pool="chat"}[1m]))') == []
