"""The chart's dashboards and alert rules on a real Prometheus that scrapes what the product emits.

It scrapes a stack, a worker and an operator's registry without faults, labelled as pool `chat`, and a gateway whose
decode worker has another ticket key than its prefill worker, labelled as pool `faulty`: there every hand-off fails.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness.prometheus.server import Prometheus, Target, running_prometheus
from harness.servers.processes import RunningProcess, a_worker, running
from harness.servers.worker_channel import TEST_KEYS
from harness.waiting import until
from kubernetes.client import ApiClient
from prometheus_client import start_http_server

from kvferry.core.clock import SystemClock
from kvferry.operator.api import KubeApi
from kvferry.operator.plan.process.work_queue import WorkQueue
from kvferry.operator.pool.facts import Key
from kvferry.operator.process.instruments import OperatorInstruments

CHART = Path(__file__).resolve().parents[2] / "charts/kvferry/files"
ALERTS = CHART / "alerts/kvferry.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
ENGINE = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--threads", "1", "--load-policy", "always")
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
TIERS = ("--tier", "dram://?size=16MiB")
PROMPT = "many words that fill several blocks of the cache " * 4
FAULTS = {"KvferryHandoffsFail": "faulty", "KvferryOperatorDoesNotLead": None}
"""The alerts whose faults are present, and their pools."""
_SELECTOR = re.compile(r"\b((?:kvferry_(?!dev_)|vllm:)[a-z0-9_]+)(?:{[^}]*})?")

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
    return query.replace("$__rate_interval", "1m").replace("$pool", "chat|faulty").replace("$namespace", ".*")


@dataclass(frozen=True)
class Scraped:
    """A Prometheus that scrapes the processes."""

    prometheus: Prometheus
    complete: Callable[[], None]
    """Sends a request to the stack and one to the gateway whose hand-offs fail."""


def labels(pool: str, role: str) -> dict[str, str]:
    return {"kvferry_dev_pool": pool, "kvferry_dev_role": role, "namespace": "ns", "pod": f"{pool}-{role}"}


def operator_target() -> Target:
    """Serve the metrics of an operator that does not lead and has reconciled once."""
    api = KubeApi(ApiClient())
    api.num_calls["GET Pod"] = 1
    instruments = OperatorInstruments(api, WorkQueue[Key](), SystemClock())
    instruments.reconcile_seconds.observe(0.1)
    instruments.failures.labels("UNAVAILABLE").inc()
    server, _ = start_http_server(0, "127.0.0.1", instruments.registry)
    return Target(f"127.0.0.1:{server.server_port}", {"namespace": "ns", "pod": "operator"})


def endpoint(worker: RunningProcess) -> str:
    listening = worker.events["listening"]
    return f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"


@contextmanager
def gateway_with_failing_handoffs(folder: Path) -> Iterator[RunningProcess]:
    """Run a gateway whose prefill worker seals tickets with a new key that its decode worker does not have."""
    keys = folder / "rotated.key"
    keys.write_text(f"{'a new key of the pool ' * 2}\n{TEST_KEYS['KVFERRY_TICKET_KEY']}\n")
    rotated = ("--ticket-key-file", str(keys))
    with a_worker("prefill", *rotated, env={"KVFERRY_TICKET_KEY": ""}) as prefill, a_worker("decode") as decode:
        flags = ("--prefill", endpoint(prefill), "--decode", endpoint(decode), *ADDRESSES)
        with running("gateway", "--model", "tiny", *flags) as gateway:
            yield gateway


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as processes:
        up = running("up", *ENGINE, *TIERS, "--pool-tls", "on", "--json", *ADDRESSES)
        stack = processes.enter_context(up)
        worker = processes.enter_context(a_worker("both", "--metrics", "127.0.0.1:0"))
        faulty = processes.enter_context(gateway_with_failing_handoffs(folder)).wait_for("listening")
        ready, listening = stack.wait_for("ready"), worker.wait_for("listening")
        targets = [
            Target(str(ready["admin"]), labels("chat", "gateway")),
            Target(str(listening["metrics"]), labels("chat", "both")),
            Target(str(faulty["admin"]), labels("faulty", "gateway")),
            operator_target(),
        ]
        numbers = itertools.count()

        def complete() -> None:
            for http in (ready["http"], faulty["http"]):
                body = {"prompt": f"{next(numbers)} {PROMPT}", "max_tokens": 24, "ignore_eos": True}
                answer = httpx.post(f"http://{http}/v1/completions", json=body, timeout=60)
                assert answer.status_code == 200, answer.text

        until(lambda: httpx.get(f"http://{faulty['http']}/ready").status_code == 200, "the gateway has its workers")
        server = processes.enter_context(running_prometheus(folder, targets, [ALERTS]))
        server.wait_for(f"count(up == 1) == {len(targets)}")
        yield Scraped(server, complete)
        assert stack.stop() == 0


def test_each_query_of_the_dashboards_has_data(scraped: Scraped) -> None:
    queries = [q for path in (CHART / "dashboards").glob("*.json") for q in expressions(json.loads(path.read_text()))]
    assert len(queries) > 10
    for query in map(without_variables, queries):
        scraped.prometheus.wait_for(query, act=scraped.complete)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_metric_of_an_alert_has_series_with_the_labels_of_its_text(rule: dict[str, Any], scraped: Scraped) -> None:
    names = set(_SELECTOR.findall(rule["expr"]))
    assert names
    if "kvferry_gateway_refusals_total" in names:
        pytest.skip("a counter by reason has no series before the first refusal")
    for name in names:
        scraped.prometheus.wait_for(name, act=scraped.complete)
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert any(scraped.prometheus.query(f'{name}{{{label}!=""}}') for name in names), f"no {label}"


def test_failed_hand_offs_are_an_alert_of_their_pool_and_of_no_other(scraped: Scraped) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "KvferryHandoffsFail")
    series = scraped.prometheus.wait_for(rule["expr"], act=scraped.complete)
    assert [one["metric"] for one in series] == [{"kvferry_dev_pool": "faulty", "namespace": "ns"}]
    counted = scraped.prometheus.query("sum by (outcome) (kvferry_gateway_handoffs_total) > 0")
    assert {one["metric"]["outcome"] for one in counted} >= {"fetched", "key_unknown"}


def test_each_rule_is_evaluated_and_those_of_the_faults_are_pending(scraped: Scraped) -> None:
    def rules() -> dict[str, Any]:
        return {rule["name"]: rule for group in scraped.prometheus.get("rules")["groups"] for rule in group["rules"]}

    def active() -> dict[str, str | None]:
        return {
            name: alert["labels"].get("kvferry_dev_pool")
            for name, rule in rules().items()
            if rule["state"] != "inactive"
            for alert in rule["alerts"]
        }

    def are_the_faults() -> bool:
        scraped.complete()
        return active() == FAULTS

    assert list(rules()) == [rule["alert"] for rule in RULES]
    until(are_the_faults, f"the alerts {FAULTS} are active")
    assert {rule["health"] for rule in rules().values()} == {"ok"}


def test_a_query_that_is_wrong_fails(scraped: Scraped) -> None:
    with pytest.raises(AssertionError, match="bad_data"):
        scraped.prometheus.query("sum(rate(kvferry_gateway_requests_total))")
    assert scraped.prometheus.query('sum(rate(kvferry_gateway_requests_total{pool="chat"}[1m]))') == []
