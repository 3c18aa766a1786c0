"""A pool's status, computed from observations."""

from typing import Any

import pytest
from unit.operator.pools import pool

from kvferry.operator.plan.actions import Problem
from kvferry.operator.plan.conditions.certificates import TlsSeen
from kvferry.operator.plan.rollout import Count, RoleState
from kvferry.operator.plan.status import Observed, first_status, status_of, unreadable_status
from kvferry.operator.pool.facts import FleetReport, WorkerReport
from kvferry.operator.pool.names import Condition


def worker(name: str, role: str, **fields: Any) -> WorkerReport:
    return WorkerReport(name, role, **{"takes_work": True, "fingerprint": "f", "family": "g", **fields})


GOOD = FleetReport(0.0, (worker("p", "prefill"), worker("d", "decode")))


def seen(spec: dict[str, Any] | None = None, **fields: Any) -> Observed:
    roles = [RoleState(name, 1, {"r": Count(1, 1)}) for name in ("prefill", "decode")]
    plain = {
        "pool": pool(**(spec or {})),
        "revision": "r",
        "roles": roles,
        "waiting_for": "",
        "gateway_desired": 1,
        "gateway_ready": 1,
        "report": GOOD,
    }
    plain["fleet"] = fields.get("report", GOOD)
    return Observed(**{**plain, **fields})


def reported(observed: Observed, condition: Condition) -> tuple[str, str]:
    entries = {entry["type"]: entry for entry in status_of(observed, {}, "now")["conditions"]}
    return (entries[condition]["status"], entries[condition]["reason"]) if condition in entries else ("", "")


def of(*workers: WorkerReport) -> FleetReport:
    return FleetReport(0.0, workers)


def context(model: int, worker_tokens: int) -> FleetReport:
    roles = ("prefill", "decode")
    return FleetReport(0.0, tuple(worker(r, r, context_tokens=worker_tokens) for r in roles), model_tokens=model)


def adapters(digest: str, **failures: str) -> FleetReport:
    return of(worker("p", "prefill", adapters=(("support", digest),), adapter_failures=failures))


WITH_ADAPTER = {"adapters": [{"name": "support", "source": "/models/s", "digest": "ab" * 8}]}
ASLEEP = [RoleState("prefill", 0, {}), RoleState("decode", 0, {})]
NO_DECODE = [RoleState("prefill", 1, {"r": Count(1, 1)}), RoleState("decode", 0, {})]
WAKES = {"roles": [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External", "minReplicas": 0}}]}
LATER = 1_000 * 86_400.0
CASES = [
    (Condition.CERTIFICATES_VALID, {}, ("", "")),
    (Condition.CERTIFICATES_VALID, {"tls": TlsSeen("Managed", LATER, 0.0)}, ("True", "Valid")),
    (Condition.CERTIFICATES_VALID, {"tls": TlsSeen("Secret", 6 * 86_400.0, 0.0)}, ("False", "Expiring")),
    (Condition.CERTIFICATES_VALID, {"tls": TlsSeen("Managed", 10.0, 20.0)}, ("False", "Expired")),
    (Condition.CERTIFICATES_VALID, {"tls": TlsSeen("Secret", 0.0, 20.0)}, ("Unknown", "NotReportedYet")),
    (Condition.READY, {}, ("True", "Serving")),
    (Condition.READY, {"gateway_ready": 0}, ("False", "NoGatewayPodReady")),
    (Condition.READY, {"waiting_for": "x"}, ("False", "NotAllReady")),
    (Condition.READY, {"refused": Problem("Refused", "m")}, ("False", "Refused")),
    (Condition.READY, {"report": None}, ("Unknown", "GatewayReportMissing")),
    (Condition.READY, {"roles": ASLEEP, "report": of()}, ("True", "ScaledToZero")),
    (Condition.READY, {"roles": NO_DECODE, "report": of(worker("p", "prefill"))}, ("False", "RoleWithoutPods")),
    (Condition.AVAILABLE, {}, ("True", "Serving")),
    (Condition.AVAILABLE, {"waiting_for": "x", "stuck": "y", "report": None, "fleet": GOOD}, ("True", "Serving")),
    (Condition.AVAILABLE, {"gateway_ready": 0}, ("False", "NoGatewayPodReady")),
    (Condition.AVAILABLE, {"gateway_ready": 0, "is_answering": True}, ("True", "Serving")),
    (Condition.AVAILABLE, {"gateway_desired": 0, "is_answering": True}, ("False", "NoGateway")),
    (Condition.AVAILABLE, {"report": None}, ("Unknown", "GatewayReportMissing")),
    (Condition.AVAILABLE, {"report": of(worker("p", "prefill"))}, ("False", "NoWorkerServes")),
    (Condition.AVAILABLE, {"roles": ASLEEP, "report": of()}, ("False", "RoleWithoutPods")),
    (Condition.AVAILABLE, {"spec": WAKES, "roles": NO_DECODE, "report": of()}, ("True", "ScaledToZero")),
    (Condition.AVAILABLE, {"report": of(worker("b", "both"))}, ("True", "Serving")),
    (Condition.PROGRESSING, {}, ("False", "Complete")),
    (Condition.PROGRESSING, {"waiting_for": "x"}, ("True", "RollingOut")),
    (Condition.PROGRESSING, {"waiting_for": "x", "stuck": "y"}, ("False", "DeadlineExceeded")),
    (Condition.PROGRESSING, {"waiting_for": "x", "spec": {"rollout": {"paused": True}}}, ("False", "Paused")),
    (Condition.PROGRESSING, {"rollback": Problem("RevisionNotFound", "m")}, ("False", "RevisionNotFound")),
    (Condition.ROLES_READY, {"rollback": Problem("RevisionNotFound", "m")}, ("False", "RevisionNotFound")),
    (Condition.ROLES_READY, {"waiting_for": "x", "stuck": "y"}, ("False", "DeadlineExceeded")),
    (Condition.ROLES_READY, {"waiting_for": "x", "spec": {"rollout": {"paused": True}}}, ("False", "Paused")),
    (Condition.GATEWAY_READY, {"gateway_desired": 0}, ("False", "NoGateway")),
    (Condition.MODEL_AVAILABLE, {"report": of()}, ("Unknown", "NoWorkerServes")),
    (Condition.MODEL_AVAILABLE, {"report": of(), "roles": ASLEEP}, ("Unknown", "ScaledToZero")),
    (
        Condition.MODEL_AVAILABLE,
        {
            "spec": {"model": {"name": "m", "digest": "ab" * 8}},
            "report": of(worker("p", "prefill", model_digest="cd" * 32)),
        },
        ("False", "DigestMismatch"),
    ),
    (
        Condition.MODEL_AVAILABLE,
        {
            "spec": {"model": {"name": "m", "digest": "ab" * 8}},
            "report": of(worker("p", "prefill", model_digest="ab" * 32)),
        },
        ("True", "Serving"),
    ),
    (Condition.PAIRING_COMPATIBLE, {}, ("True", "EqualLayouts")),
    (Condition.PAIRING_COMPATIBLE, {"report": None}, ("Unknown", "GatewayReportMissing")),
    (Condition.PAIRING_COMPATIBLE, {"roles": [RoleState("both", 1, {})]}, ("True", "NotNeeded")),
    (Condition.PAIRING_COMPATIBLE, {"report": of(worker("p", "prefill"))}, ("Unknown", "NoPairYet")),
    (
        Condition.PAIRING_COMPATIBLE,
        {"report": of(worker("p", "prefill"), worker("d", "decode", fingerprint="h"))},
        ("True", "Converted"),
    ),
    (
        Condition.PAIRING_COMPATIBLE,
        {"report": of(worker("p", "prefill"), worker("d", "decode", fingerprint="h", family="i"))},
        ("False", "NoCommonLayout"),
    ),
    (Condition.CONTEXT_AVAILABLE, {"report": None}, ("Unknown", "GatewayReportMissing")),
    (Condition.CONTEXT_AVAILABLE, {}, ("Unknown", "NoWorkerServes")),
    (Condition.CONTEXT_AVAILABLE, {"report": context(8192, 8192)}, ("True", "FullContext")),
    (Condition.CONTEXT_AVAILABLE, {"report": context(8192, 4096)}, ("False", "LimitedByKvMemory")),
    (
        Condition.CONTEXT_AVAILABLE,
        {"report": context(8192, 4096), "spec": {"model": {"name": "m", "maxModelLen": 4096}}},
        ("True", "FullContext"),
    ),
    (Condition.ADAPTERS_LOADED, {}, ("", "")),
    (Condition.ADAPTERS_LOADED, {"spec": WITH_ADAPTER, "report": None}, ("Unknown", "GatewayReportMissing")),
    (Condition.ADAPTERS_LOADED, {"spec": WITH_ADAPTER, "report": of()}, ("Unknown", "NoWorkerServes")),
    (Condition.ADAPTERS_LOADED, {"spec": WITH_ADAPTER}, ("False", "Loading")),
    (Condition.ADAPTERS_LOADED, {"spec": WITH_ADAPTER, "report": adapters("ab" * 32)}, ("True", "Loaded")),
    (Condition.ADAPTERS_LOADED, {"spec": WITH_ADAPTER, "report": adapters("cd" * 32)}, ("False", "Loading")),
    (
        Condition.ADAPTERS_LOADED,
        {"spec": WITH_ADAPTER, "report": adapters("ab" * 32, support="no such folder")},
        ("False", "LoadFailed"),
    ),
    (Condition.TRANSPORT_DEGRADED, {"handoffs": {"fetched": 2, "key_unknown": 2}}, ("Unknown", "InsufficientSamples")),
    (Condition.TRANSPORT_DEGRADED, {"handoffs": {"fetched": 3, "key_unknown": 3}}, ("True", "KeysDiffer")),
    (Condition.TRANSPORT_DEGRADED, {"handoffs": {"fetched": 97, "key_unknown": 3}}, ("False", "HandoffsFetched")),
    (Condition.TRANSPORT_DEGRADED, {"handoffs": {"fetched": 19}}, ("Unknown", "InsufficientSamples")),
    (Condition.TRANSPORT_DEGRADED, {"handoffs": {"fetched": 80, "failed": 20}}, ("False", "HandoffsFetched")),
    (Condition.TRANSPORT_DEGRADED, {"handoffs": {"fetched": 79, "failed": 21}}, ("True", "HandoffsFail")),
    (Condition.REPLICAS_CONTESTED, {}, ("False", "SingleWriter")),
    (Condition.REPLICAS_CONTESTED, {"contested": Problem("OtherManager", "m")}, ("True", "OtherManager")),
    (Condition.CHILDREN_APPLIED, {"refused": Problem("NameTaken", "m")}, ("False", "NameTaken")),
    (Condition.GATEWAY_INTEGRATION, {}, ("", "")),
    (Condition.GATEWAY_INTEGRATION, {"extension": Problem("Emitted", "m")}, ("True", "Emitted")),
    (Condition.GATEWAY_INTEGRATION, {"extension": Problem("KindNotInstalled", "m")}, ("False", "KindNotInstalled")),
]


@pytest.mark.parametrize(("condition", "fields", "text"), CASES)
def test_each_condition_has_status_reason_and_message(condition, fields, text):
    spec = fields.get("spec")
    assert reported(seen(spec, **{k: v for k, v in fields.items() if k != "spec"}), condition) == text


def test_certificates_are_shown_in_the_status_with_a_remedy():
    status = status_of(seen(tls=TlsSeen("Secret", 86_400.0, 0.0)), {}, "now")
    assert status["tls"] == {"mode": "Secret", "notAfter": "1970-01-02T00:00:00Z"}
    (entry,) = (entry for entry in status["conditions"] if entry["type"] == Condition.CERTIFICATES_VALID)
    assert "spec.tls.secretName" in entry["message"]


def test_a_role_names_its_devices_and_how_their_kv_is_transferred():
    gpu = {"device": "NVIDIA H100", "is_staged": True}
    report = of(worker("p", "prefill", **gpu), worker("q", "prefill", **gpu), worker("d", "decode", device="cpu"))
    roles = status_of(seen(fleet=report), {}, "now")["roles"]
    assert [(role["name"], role["device"], role["transfers"]) for role in roles] == [
        ("prefill", "NVIDIA H100", "Staged"),
        ("decode", "cpu", "Direct"),
    ]
    assert "device" not in status_of(seen(fleet=None), {}, "now")["roles"][0]


def test_every_condition_has_a_case():
    assert {condition for condition, *_ in CASES} == set(Condition)


def test_a_transition_time_moves_only_on_a_flip():
    first = status_of(seen(), {}, "1")
    second = status_of(seen(gateway_ready=0), first, "2")
    third = status_of(seen(gateway_ready=0, waiting_for="x"), second, "3")
    times = [{c["type"]: c["lastTransitionTime"] for c in s["conditions"]} for s in (first, second, third)]
    assert [t["Ready"] for t in times] == ["1", "2", "2"]
    assert [t["ChildrenApplied"] for t in times] == ["1", "1", "1"]
    assert [t["Progressing"] for t in times] == ["1", "1", "3"]


def test_a_surplus_of_ready_pods_is_not_counted():
    roles = [RoleState("prefill", 2, {"r": Count(1, 1), "q": Count(2, 2)}), RoleState("decode", 1, {"r": Count(1, 1)})]
    status = status_of(seen(roles=roles, gateway_desired=2, gateway_ready=3), {}, "now")
    assert status["roles"][0]["summary"] == "2/2"
    assert status["gateway"] == {"desired": 2, "ready": 2}
    assert "2 of 2 gateway pods" in next(c["message"] for c in status["conditions"] if c["type"] == "GatewayReady")


def test_a_healthy_worker_is_not_named_as_a_cause():
    fleet = of(worker("p", "prefill"), worker("d", "decode", takes_work=False, why_not="it is draining"))
    entries = status_of(seen(report=fleet), {}, "now")["conditions"]
    message = next(entry["message"] for entry in entries if entry["type"] == "Available")
    assert message == "no workers of role decode accept requests: d: it is draining"


def test_a_report_from_before_the_end_of_a_rollout_keeps_the_conditions_and_not_ready():
    before = {c["type"]: c["status"] for c in status_of(seen(), {}, "1")["conditions"]}
    after = {c["type"]: c["status"] for c in status_of(seen(is_report_old=True), {}, "2")["conditions"]}
    assert after == {**before, "Ready": "False"}


def test_roles_show_ready_of_all_replicas_and_omit_removed_ones():
    roles = [
        RoleState("prefill", 3, {"r": Count(2, 1), "q": Count(1, 1), "o": Count(0, 0)}),
        RoleState("both", 0, {}),
    ]
    (shown,) = status_of(seen(roles=roles), {}, "now")["roles"]
    assert shown == {
        "name": "prefill",
        "summary": "2/3",
        "desired": 3,
        "ready": 2,
        "updated": 1,
        "revisions": [{"revision": "q", "desired": 1, "ready": 1}, {"revision": "r", "desired": 2, "ready": 1}],
    }


def test_the_first_status_of_conditions_is_unknown():
    assert {c["status"] for c in first_status(pool(), "now")["conditions"]} == {"Unknown"}


def test_a_spec_that_is_not_understood_is_reported_once():
    first = unreadable_status({"metadata": {"generation": 3}}, "spec.x: what", "1")
    again = unreadable_status({"metadata": {"generation": 4}, "status": first}, "spec.x: what", "2")
    assert first["conditions"][0]["reason"] == "InvalidSpec"
    assert again["conditions"][0]["lastTransitionTime"] == "1"


def test_a_message_is_bounded():
    status = status_of(seen(refused=Problem("Refused", "x" * 40_000)), {}, "now")
    assert max(len(c["message"]) for c in status["conditions"]) == 32768


def test_ready_carries_the_cause():
    entries = status_of(seen(gateway_ready=0, diagnosis='secret "x" not found'), {}, "now")["conditions"]
    ready = next(entry for entry in entries if entry["type"] == "Ready")
    assert ready["message"] == '0 of 1 gateway pods are ready (secret "x" not found)'
