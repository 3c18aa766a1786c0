"""The values of labels in the table of metrics are those that the code emits."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from kvferry.core.errors import KvferryError
from kvferry.core.handoffs import LOST, TRIED, HandoffOutcome
from kvferry.core.metrics import all_metrics, gateway_metrics
from kvferry.core.metrics.metric import Metric
from kvferry.gateway.batches.states import BatchState
from kvferry.gateway.decide.cache_map.audit import AuditOutcome
from kvferry.gateway.decide.cache_map.cache_map import Basis
from kvferry.gateway.decide.cache_map.map_states import LOSSES, MapState
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE
from kvferry.gateway.decide.routing.routes import RouteReason
from kvferry.gateway.observe import instruments
from kvferry.rpc import worker_wire
from kvferry.v1 import decode_pb2

ROOT = Path(__file__).resolve().parents[2]
EMITTED: Mapping[tuple[str, str], Iterable[str]] = {
    (gateway_metrics.STREAMS.name, "outcome"): MACHINE.final,
    (gateway_metrics.ROUTES.name, "reason"): RouteReason,
    (gateway_metrics.HANDOFFS.name, "outcome"): HandoffOutcome,
    (gateway_metrics.PROMPT_SOURCES.name, "source"): instruments.SOURCES,
    (gateway_metrics.CACHE_PREDICTIONS.name, "basis"): Basis,
    (gateway_metrics.MAP_STATE.name, "state"): set(MapState) - {MapState.GONE},
    (gateway_metrics.MAP_LOSSES.name, "reason"): LOSSES,
    (gateway_metrics.MAP_AUDITS.name, "outcome"): {
        *set(AuditOutcome) - {AuditOutcome.WAIT},
        "failed",
        "stalled",
    },
    (gateway_metrics.BATCHES.name, "state"): set(BatchState) - {BatchState.VALIDATING, BatchState.CANCELLING},
    (gateway_metrics.QUEUE.name, "band"): instruments.BANDS,
}
"""Values by metric and label, for labels whose values have an enumeration in the code."""


def subclasses(kind: type[KvferryError]) -> set[type[KvferryError]]:
    found = set(kind.__subclasses__())
    return found.union(*map(subclasses, found))


def test_the_table_has_the_values_of_the_enumerations() -> None:
    table = {metric.name: metric for metric in all_metrics.ALL}
    for (name, label), values in EMITTED.items():
        assert set(table[name].values[label]) == set(map(str, values)), f"{label} of {name}"


def test_values_belong_to_labels_of_the_metric_and_are_unique() -> None:
    for metric in all_metrics.ALL:
        for label, values in metric.values.items():
            assert label in metric.labels
            assert len(set(values)) == len(values) > 0, f"{label} of {metric.name}"


def test_each_http_status_of_an_error_is_a_value() -> None:
    statuses = {str(kind.http_status) for kind in subclasses(KvferryError)}
    assert statuses <= set(gateway_metrics.REQUESTS.values["status"])


def test_each_reason_of_a_refusal_in_the_code_is_a_value() -> None:
    quotas = (ROOT / "services/kvferry/gateway/decide/flow/quotas.py").read_text("utf-8")
    gate = (ROOT / "services/kvferry/gateway/admission/flow_gate.py").read_text("utf-8")
    found = set(re.findall(r'over_quota\(tenant, "(\w+)"', quotas))
    found |= set(re.findall(r'"(\w+)"', gate[gate.index("def _reason(") :])) - {"POOL_EMPTY"}
    assert {*found, "cancelled", "model"} == set(gateway_metrics.REFUSALS.values["reason"])


def test_each_outcome_of_the_protocol_is_an_outcome_of_the_vocabulary() -> None:
    wired = {
        worker_wire.handoff_outcome_from_wire(value)
        for value in decode_pb2.Handoff.Outcome.values()
        if value != decode_pb2.Handoff.OUTCOME_UNSPECIFIED
    }
    assert wired == set(HandoffOutcome) - {HandoffOutcome.REJECTED, HandoffOutcome.KEY_UNKNOWN}
    assert worker_wire.handoff_outcome_from_wire(99) is HandoffOutcome.NONE
    assert set(LOST) < set(TRIED) < set(HandoffOutcome)


def test_the_chart_and_the_documents_have_the_outcomes_of_the_vocabulary() -> None:
    alerts = (ROOT / "charts/kvferry/files/alerts/kvferry.yaml").read_text("utf-8")
    selectors = re.findall(r'handoffs_total{outcome=~"([^"]+)"}', alerts)
    assert selectors == ["|".join(LOST), "|".join(TRIED)]
    operations = (ROOT / "docs/operations.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \|", operations[operations.index("### Outcomes of hand-offs") :], re.MULTILINE)
    assert table[: len(HandoffOutcome)] == list(HandoffOutcome)


def test_a_value_outside_of_the_set_is_refused() -> None:
    metric: Metric = gateway_metrics.MAP_STATE
    assert metric.checked("any worker", "exact") == ("any worker", "exact")
    with pytest.raises(ValueError, match="label state of kvferry_gateway_cache_map_state has no value 'gone'"):
        metric.checked("any worker", "gone")
