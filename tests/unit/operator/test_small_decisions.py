"""Leases, heartbeats, victims, overlays, records and previews: small pure decisions with their edge cases."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from unit.operator.pools import IMAGE, body, pool

from kvferry.core.clock import ManualClock
from kvferry.core.errors import UsageError
from kvferry.core.load import WorkerLoad
from kvferry.operator.objects.overlay import overlay
from kvferry.operator.objects.worker_pods import deployments
from kvferry.operator.plan.deletion_cost import changed_costs, deletion_costs
from kvferry.operator.plan.pod_diagnostics import mount_failures, needs_events, troubles
from kvferry.operator.plan.process.fleet_page import read_fleet
from kvferry.operator.plan.process.heartbeat import Heartbeat
from kvferry.operator.plan.process.lease import LeaseTimes, may_take, released, sighted, taken, watched_by
from kvferry.operator.plan.process.work_queue import WorkQueue
from kvferry.operator.plan.revisions import next_number, record, recorded, superfluous
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store, WorkerReport
from kvferry.operator.pool.ownership import entry_removal, version_of
from kvferry.operator.pool.spec import parse_pool, pods_of
from kvferry.operator.preview.preview import preview
from kvferry.operator.process.checkup import judge_definitions, judge_nodes, judge_operators, judge_pool, judge_version
from kvferry.operator.process.health import HealthServer
from kvferry.operator.process.instruments import OperatorInstruments
from kvferry.operator.process.keys_probe import KeysProbe
from kvferry.operator.process.leader import LeaseHolder

EVERYWHERE = {"kvferry": LeaseHolder("one")}
"""An operator that reconciles all pools."""


def lease(holder: str, duration: int = 15) -> dict:
    return {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration}}


def test_a_lease_is_taken_when_it_is_free_or_its_holder_is_silent_by_the_local_clock():
    seen = sighted(None, "7", 100.0)
    assert may_take(None, "me", None, 0)
    assert may_take(lease(""), "me", None, 0)
    assert may_take(lease("me"), "me", None, 0)
    assert not may_take(lease("you"), "me", None, 0)
    assert not may_take(lease("you"), "me", seen, 114.9)
    assert may_take(lease("you"), "me", seen, 115.1)
    assert sighted(seen, "7", 110.0) is seen
    assert not may_take(lease("you"), "me", sighted(seen, "8", 114.0), 116.0)


def test_a_change_of_holder_is_counted_and_dated():
    times = LeaseTimes()
    first = taken(None, "a", times, "1", name="n", namespace="s")
    assert first["metadata"] == {"name": "n", "namespace": "s", "annotations": {"kvferry.dev/namespaces": ""}}
    assert watched_by(first) == watched_by({"metadata": {}}) == ()
    assert watched_by(taken(first, "a", times, "1", name="n", namespace="s", watched=("x", "y"))) == ("x", "y")
    assert first["spec"]["leaseTransitions"] == 0
    again = taken(first, "a", times, "2", name="n", namespace="s")
    assert (again["spec"]["acquireTime"], again["spec"]["renewTime"]) == ("1", "2")
    other = taken(again, "b", times, "3", name="n", namespace="s")
    assert (other["spec"]["leaseTransitions"], other["spec"]["acquireTime"]) == (1, "3")
    assert may_take(released(other, "4"), "c", None, 0)


def test_a_missing_heartbeat_makes_a_watch_late():
    beat = Heartbeat(10.0)
    assert beat.is_due(0.0)
    beat.marked("m", 0.0)
    assert not beat.is_due(50.0)
    assert beat.late_seconds(10.0) == 0
    assert beat.late_seconds(12.0) == 2.0
    beat.saw("another")
    assert beat.late_seconds(12.0) == 2.0
    beat.saw("m")
    assert beat.late_seconds(99.0) == 0
    assert not beat.is_due(9.0)
    assert beat.is_due(10.0)
    beat.marked("n", 10.0)
    beat.unmarked()
    assert beat.late_seconds(99.0) == 0


def test_the_first_pod_to_remove_is_the_one_with_the_least_load():
    report = (
        WorkerReport("busy", "decode", takes_work=True, load=WorkerLoad(running=2, blocks_total=10, blocks_free=5)),
        WorkerReport("warm", "decode", takes_work=True, load=WorkerLoad(blocks_total=10, blocks_free=2)),
        WorkerReport("cold", "decode", takes_work=True, load=WorkerLoad(blocks_total=10, blocks_free=10)),
        WorkerReport("gone", "decode", takes_work=False, load=WorkerLoad(running=9)),
        WorkerReport("other", "decode", takes_work=True),
    )
    now = {"busy": 0, "warm": 0, "cold": 0, "gone": 5}
    costs = deletion_costs(report)
    assert (costs["warm"], costs["cold"]) == (8, 0)
    assert changed_costs(costs, now) == {"busy": 2005, "warm": 8, "gone": 0}


def test_an_overlay_merges_by_name_and_replaces_the_rest():
    base = {
        "containers": [{"name": "w", "env": [{"name": "A", "value": "1"}], "args": ["x"]}],
        "tolerations": [{"key": "a"}],
        "nodeSelector": {"a": "1"},
        "hostNetwork": True,
    }
    over = {
        "containers": [
            {"name": "w", "env": [{"name": "B", "value": "2"}], "args": ["y"]},
            {"name": "side"},
            {"image": "i"},
        ],
        "tolerations": [{"key": "a"}, {"key": "b"}],
        "nodeSelector": {"b": "2"},
        "hostNetwork": None,
    }
    assert overlay(base, over) == {
        "containers": [
            {"name": "w", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": ["y"]},
            {"name": "side"},
            {"image": "i"},
        ],
        "tolerations": [{"key": "a"}, {"key": "b"}],
        "nodeSelector": {"a": "1", "b": "2"},
    }
    assert base["hostNetwork"] is True


def test_the_pools_labels_override_a_template_and_other_fields_are_merged():
    made = deployments(
        pool(roles=[{"name": "both", "template": {"metadata": {"labels": {"a": "b", names.LABEL_ROLE: "x"}}}}]),
        "r",
        IMAGE,
    )
    labels = made["both"]["spec"]["template"]["metadata"]["labels"]
    assert (labels["a"], labels[names.LABEL_ROLE]) == ("b", "both")


def test_a_record_restores_its_pods_with_the_pools_present_owner():
    before = pool()
    made = deployments(before, "r", IMAGE)
    kept = json.loads(json.dumps(record(before, "r", 3, made)))
    after = parse_pool({**body(), "metadata": {**body()["metadata"], "uid": "u-2"}})
    again = recorded(after, "r", kept)
    assert {role: d["spec"] for role, d in again.items()} == {role: d["spec"] for role, d in made.items()}
    assert again["prefill"]["metadata"]["ownerReferences"][0]["uid"] == "u-2"


def test_a_record_contains_the_pods_and_not_their_names():
    forged = {
        "data": {
            "deployments": {"prefill": {"kind": "Role", "metadata": {"name": "x"}, "spec": {}}, "root": {"spec": {}}}
        }
    }
    (made,) = recorded(pool(), "cafebabe", forged).values()
    assert (made["kind"], made["metadata"]["name"]) == ("Deployment", "chat-prefill-cafebabe")


def test_records_are_numbered_and_the_oldest_unused_ones_are_deleted():
    found = [
        {"metadata": {"name": f"chat-{n}", "labels": {names.LABEL_REVISION: str(n)}}, "revision": n}
        for n in (3, 1, 2, 4)
    ]
    assert next_number(found) == 5
    assert next_number([]) == 1
    assert superfluous(found, frozenset({"4"}), 1) == ["chat-1", "chat-2"]
    assert superfluous(found, frozenset({"4"}), 9) == []


@pytest.mark.parametrize(
    ("amount", "total", "up", "pods"),
    [("25%", 4, True, 1), ("25%", 5, True, 2), ("25%", 5, False, 1), ("3", 1, True, 3), ("0%", 9, True, 0)],
)
def test_percentages_round_as_deployments_do(amount, total, up, pods):
    assert pods_of(amount, total, up=up) == pods


def test_a_spec_that_does_not_fit_names_the_field():
    with pytest.raises(UsageError, match=r"replicas"):
        parse_pool(body(roles=[{"name": "prefill", "replicas": "two"}]))


def test_reports_of_pods_are_gathered_by_kind():
    def pod(name: str, **status) -> dict:
        return {"metadata": {"name": name}, "status": status}

    def waits(reason: str) -> dict:
        return {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": reason, "message": "m"}}}]}

    ready = pod("r", conditions=[{"type": "Ready", "status": "True"}], **waits("Odd"))
    leaving = {"metadata": {"name": "l", "deletionTimestamp": "x"}, "status": waits("Odd")}
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "no room"}
    pulling = [pod(name, **waits("ErrImagePull")) for name in "ab"]
    starting = pod("c", **waits("ContainerCreating"))
    found = troubles([*pulling, starting, pod("d", conditions=[unscheduled]), ready, leaving, pod("e")])
    assert found == ["a and 1 more: worker is waiting: ErrImagePull m", "d: cannot be scheduled: no room"]


def pod(name: str, **status: Any) -> dict:
    return {"metadata": {"name": name}, "status": status}


def crashed(state: dict, **last: Any) -> dict:
    return {"containerStatuses": [{"name": "worker", "state": state, "lastState": {"terminated": last}}]}


def test_a_crash_is_reported_with_the_last_line_of_its_log():
    backs_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    log = "loading\nkv_memory of 3145728 bytes holds the KV of 136 tokens\n"
    expected = "a: worker exits with 1: kv_memory of 3145728 bytes holds the KV of 136 tokens"
    assert troubles([pod("a", **crashed(backs_off, exitCode=1, message=log))]) == [expected]
    assert troubles([pod("a", **crashed({"terminated": {"exitCode": 1, "message": log}}))]) == [expected]
    silent = crashed(backs_off, exitCode=2)
    assert troubles([pod("a", **silent)]) == ["a: worker exits with 2; see `kubectl logs --previous`"]


def test_a_volume_that_cannot_be_mounted_is_reported_from_the_event_of_the_kubelet():
    starting = pod("a", containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}])
    starting["metadata"]["uid"] = "u"
    ready = pod("b", conditions=[{"type": "Ready", "status": "True"}])
    assert needs_events([starting, ready])
    assert not needs_events([ready, pod("c", **crashed({"waiting": {"reason": "ErrImagePull"}}))])

    def event(at: str, message: str, **more: Any) -> dict:
        event = {"reason": "FailedMount", "lastTimestamp": at, "message": message}
        return {"involvedObject": {"uid": "u"}, **event, **more}

    failures = mount_failures([event("2", 'secret "x"\nnot found'), event("1", "older"), event("3", "n", reason="Odd")])
    assert troubles([starting], failures) == ['a: secret "x" not found']
    assert troubles([starting]) == []


def test_a_preview_lists_the_steps_and_what_remains():
    found = preview(pool(), pool(model={"name": "m", "maxModelLen": 9}), IMAGE)
    assert found.restarts
    assert [step.pods for step in found.steps][-1] == {"prefill": {found.new: 1}, "decode": {found.new: 1}}
    assert min(step.capacity for step in found.steps) == 1
    assert "every worker pod is replaced" in found.as_text()
    assert json.loads(found.as_json())["restarts"] is True
    assert preview(pool(), pool(), IMAGE).as_text().endswith("nothing to do")


def test_a_preview_of_a_stored_pool_keeps_its_keys():
    stored = {**body(), "status": {"keys": "abcd"}}
    assert "nothing to do" in preview(parse_pool(stored), pool(), IMAGE).as_text()


def test_a_preview_draws_no_certificates_again():
    sealed = {"tls": {"mode": "Managed"}}
    assert preview(pool(**sealed), pool(**sealed), IMAGE).as_text().endswith("nothing to do")


def test_a_preview_of_scaling_replaces_no_pod():
    found = preview(pool(), pool(roles=[{"name": "prefill", "replicas": 3}, {"name": "decode"}]), IMAGE)
    assert not found.restarts
    assert len(found.steps) == 1


# -- the store ---------------------------------------------------------------------------------------------------------


def deployment(name: str = "chat-decode-r", generation: int = 1, **more) -> dict:
    labels = {names.LABEL_POOL: "chat", names.LABEL_ROLE: "decode", names.LABEL_REVISION: "r"}
    owners = [{"uid": "u-1", "controller": True}]
    meta = {"name": name, "namespace": "team", "uid": "d-1", "generation": generation, "labels": labels}
    return {"metadata": {**meta, "ownerReferences": owners}, "spec": {"replicas": 2}, **more}


def scaler(replicas: int = 1, generation: int = 1) -> dict:
    meta = {"name": "chat-decode", "namespace": "team", "uid": "s", "generation": generation}
    return {
        "metadata": {**meta, "labels": {names.LABEL_POOL: "chat"}},
        "spec": {"pool": "chat", "role": "decode", "replicas": replicas},
    }


def service(version: str = "1") -> dict:
    meta = {"name": "chat", "namespace": "team", "resourceVersion": version, "labels": {names.LABEL_POOL: "chat"}}
    return {"metadata": meta, "spec": {"clusterIP": "10.0.0.9", "ports": [{"name": "http", "port": 80}]}}


KEY = Key("team", "chat")


def test_a_store_distinguishes_changes_from_repetitions():
    store = Store()
    for kind, thing in (
        ("InferencePool", body()),
        ("Deployment", deployment()),
        ("PoolRoleScaler", scaler()),
        ("Service", service()),
    ):
        assert store.take(kind, thing, gone=False) == (KEY, True)
        assert store.take(kind, thing, gone=False) == (KEY, False)
    assert store.pools() == [KEY]
    facts = store.facts(KEY)
    assert facts.services["chat"].address == "10.0.0.9"
    status = {**body(), "status": {"operatorObservedAt": "x"}}
    assert store.take("InferencePool", status, gone=False) == (KEY, False)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [({}, ["chat-keys"]), ({"internalKeys": {"secretName": "mine"}}, []), ({"internalKeys": 5}, [])],
)
def test_only_generated_keys_are_probed(spec, expected):
    store = Store()
    store.take("InferencePool", body(**spec), gone=False)
    store.take("Service", service(), gone=False)
    probe = KeysProbe(None, store, ManualClock(), lambda key: None)
    assert [name for name, _ in probe._secrets(KEY)] == expected


def at(order: int, thing: dict) -> dict:
    return {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(order)}}


def test_an_older_event_does_not_undo_a_newer_one():
    store = Store()
    store.take("Deployment", at(2, deployment()), gone=False)
    assert store.take("Deployment", at(1, deployment()), gone=False) == (KEY, False)
    store.take("PoolRoleScaler", at(2, scaler(5)), gone=False)
    store.take("PoolRoleScaler", at(1, scaler(1)), gone=False)
    assert store.facts(KEY).scalers["decode"].replicas == 5


def test_the_late_answer_to_a_write_does_not_restore_a_deleted_object():
    store = Store()
    store.take("InferencePool", body(), gone=False)
    store.take("Service", at(3, service()), gone=True)
    assert store.take("Service", at(2, service()), gone=False) == (KEY, False)
    assert store.names("Service") == set()
    assert store.take("Service", at(4, service()), gone=False) == (KEY, True)
    assert store.take("Service", at(3, service()), gone=True) == (KEY, False)
    assert store.names("Service") == {("team", "chat")}


def managed(*entries: tuple[str, str, dict]) -> dict:
    fields = [{"manager": m, "operation": o, "time": "t", "fieldsV1": f} for m, o, f in entries]
    return {"metadata": {"resourceVersion": "7", "managedFields": fields}}


def test_the_removal_of_a_manager_keeps_the_other_entries_and_those_of_the_status():
    ours = (names.FIELD_MANAGER, "Apply", {"f:spec": {}})
    found = managed(("edit", "Update", {}), ours, ("edit", "Update", {}), ("edit", "Update", {}))
    found["metadata"]["managedFields"][3]["subresource"] = "status"
    assert entry_removal(found, {"edit"}) == [
        {"op": "test", "path": "/metadata/managedFields/2/manager", "value": "edit"},
        {"op": "remove", "path": "/metadata/managedFields/2"},
        {"op": "test", "path": "/metadata/managedFields/0/manager", "value": "edit"},
        {"op": "remove", "path": "/metadata/managedFields/0"},
    ]
    assert entry_removal(found, {"nobody"}) == entry_removal({"metadata": {}}, {"edit"}) == []


def test_the_version_of_an_object_is_that_of_the_fields_that_the_operator_applied():
    ours = (names.FIELD_MANAGER, "Apply", {"f:spec": {"f:ports": {}}})
    version = version_of(managed(ours))
    assert version_of(managed(ours, ("kubectl", "Update", {"f:spec": {"f:other": {}}}))) == version
    assert version_of(managed(ours, (names.FIELD_MANAGER, "Update", {"f:metadata": {}}))) == version
    assert version_of(managed((names.FIELD_MANAGER, "Apply", {"f:spec": {}}), ("kubectl", "Update", {}))) != version
    assert version_of(managed(("kubectl", "Update", {}))) not in (version, "")
    assert version_of({"metadata": {"resourceVersion": "7"}}) == "7"


def test_an_object_that_lost_its_owner_reference_still_belongs_to_the_pool():
    store = Store()
    store.take("InferencePool", body(), gone=False)
    lost = deployment()
    lost["metadata"] |= managed((names.FIELD_MANAGER, "Apply", {}))["metadata"] | {"ownerReferences": []}
    store.take("Deployment", lost, gone=False)
    assert store.facts(KEY).owned_by("u-1").deployments
    lost["metadata"] |= managed(("kubectl", "Update", {}))["metadata"] | {"resourceVersion": "8"}
    store.take("Deployment", lost, gone=False)
    assert not store.facts(KEY).owned_by("u-1").deployments


def test_deleted_objects_are_removed_from_the_store():
    store = Store()
    things = {"InferencePool": body(), "Deployment": deployment(), "PoolRoleScaler": scaler(), "Service": service()}
    for kind, thing in things.items():
        store.take(kind, thing, gone=False)
    for kind, thing in things.items():
        name = thing["metadata"]["name"]
        assert store.names(kind) == {("team", name)}
        assert store.drop(kind, "team", name) == KEY
        assert store.drop(kind, "team", name) is None
        assert store.names(kind) == set()
    assert store.facts(KEY).is_empty
    store.take("Service", service(), gone=False)
    store.take("Service", service(), gone=True)
    assert store.facts(KEY).is_empty
    assert store.take("Service", {"metadata": {"name": "x", "namespace": "y"}}, gone=False) == (None, False)
    store.take_report(KEY, None)


def test_objects_of_an_earlier_pool_of_the_name_are_not_counted():
    store = Store()
    store.take("Deployment", deployment(), gone=False)
    assert store.facts(KEY).owned_by("u-1").deployments
    assert not store.facts(KEY).owned_by("u-2").deployments


def test_a_deployment_reports_its_obstacles():
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": "quota"}]
    store = Store()
    store.take("Deployment", deployment(status={"conditions": conditions}), gone=False)
    assert store.facts(KEY).deployments["chat-decode-r"].stuck == "quota"


def test_the_valid_part_of_a_fleet_report_is_read():
    expected = {
        "workers": [{"name": "w", "role": "both", "takes_work": True, "load": {"tickets_offered": 2, "new": 1}}],
        "held": 3,
        "handoffs": {"fetched": 4, "odd": 9},
        "more": [1],
    }
    report = read_fleet(json.dumps(expected).encode(), 1.0)
    (worker,) = report.of_role("both")
    assert (worker.load.num_tickets, worker.load.kv_usage, report.held, report.handoffs) == (2, 0.0, 3, {"fetched": 4})


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"{}", b'"x"', b'{"workers":[1]}', b'{"workers":[{"name":[],"role":"both"}]}', b"[" * 100_000,
        b'{"workers":[],"more":' + b"[" * 100_000, b'{"workers":[],"handoffs":[1]}', b'{"workers":[],"held":-1}',
        b'{"workers":[{"name":"w","role":"both","load":{"running":"many"}}]}',
        b'{"workers":[],"gateway":"' + b"x" * 600 + b'"}',
        b'{"workers":[' + b",".join([b'{"name":"w","role":"both"}'] * 5001) + b"]}", b"\xff\xfe",
    ],
)  # fmt: skip
def test_invalid_fleet_reports_are_refused(raw):
    with pytest.raises(ValueError, match="not a fleet"):
        read_fleet(raw, 0.0)


# -- the check-up of a cluster -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ({"major": "1", "minor": "34", "gitVersion": "v1.34.2"}, "ok"),
        ({"major": "1", "minor": "28+"}, "bad"),
        ({}, "bad"),
    ],
)
def test_an_old_cluster_is_named(version, verdict):
    assert judge_version(version).verdict == verdict


def test_missing_definitions_come_with_the_command():
    assert "kubectl apply" in judge_definitions(["inferencepools"]).detail
    assert judge_definitions([]).verdict == "ok"


def test_nodes_are_counted_with_their_devices():
    def node(ready: str, **allocatable) -> dict:
        return {"status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": allocatable}}

    found = judge_nodes([node("True", **{"nvidia.com/gpu": "8", "cpu": "4"}), node("False", **{"nvidia.com/gpu": "8"})])
    assert (found.verdict, found.detail) == ("ok", "1 ready, 8 nvidia.com/gpu")
    assert judge_nodes([]).verdict == "bad"
    assert "CPUs" in judge_nodes([node("True")]).detail


@pytest.mark.parametrize(
    ("conditions", "verdict"),
    [
        ([], "bad"),
        ([("Ready", "False")], "bad"),
        ([("Ready", "True")], "ok"),
        ([("Ready", "True"), ("ReplicasContested", "True")], "note"),
        ([("Ready", "True"), ("TransportDegraded", "False")], "ok"),
        ([("Ready", "True"), ("CertificatesValid", "False")], "note"),
        ([("Ready", "True"), ("CertificatesValid", "Unknown")], "ok"),
    ],
)
def test_doctor_reports_the_conditions_of_a_pool(conditions, verdict):
    listed = [{"type": t, "status": s, "reason": "R", "message": "m"} for t, s in conditions]
    seen = {**body(), "status": {"observedGeneration": 1, "conditions": listed}}
    assert judge_pool(seen, EVERYWHERE).verdict == verdict
    assert judge_pool({**seen, "status": {**seen["status"], "observedGeneration": 0}}, EVERYWHERE).verdict == "bad"


def test_doctor_names_the_namespaces_of_the_operators_for_a_pool_outside_of_them():
    leaders = {"kvferry": LeaseHolder("one", ("a", "b"))}
    assert "reconciles pools in namespaces a, b (lease in namespace kvferry)" in judge_operators(leaders)[0].detail
    assert "in all namespaces" in judge_operators(EVERYWHERE)[0].detail
    found = judge_pool(body(), leaders)
    assert found.verdict == "bad"
    assert found.detail.startswith("no operator reconciles pools in namespace team, only in a, b; add it to operator.")
    for others in ({"x": LeaseHolder("one", ("team",))}, EVERYWHERE, {}):
        assert "see `operator` above" in judge_pool(body(), others).detail


def test_doctor_reports_whether_the_pods_use_tls():
    def detail(*conditions: tuple[str, str, str]) -> str:
        listed = [{"type": t, "status": s, "reason": "R", "message": m} for t, s, m in conditions]
        return judge_pool({**body(), "status": {"observedGeneration": 1, "conditions": listed}}, EVERYWHERE).detail

    ready = ("Ready", "True", "serves")
    assert "not encrypted (spec.tls)" in detail(ready)
    assert detail(ready, ("CertificatesValid", "True", "until then")) == "serves; until then"


async def test_the_metrics_page_has_no_series_of_creation_times():
    api: Any = SimpleNamespace(num_calls={"get Service": 1})
    instruments = OperatorInstruments(api, WorkQueue(), ManualClock())
    instruments.reconcile_seconds.observe(0.1)
    health = await HealthServer.start("127.0.0.1:0", lambda: "", instruments.registry)
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{health.port}/metrics")).text
    await health.stop()
    assert "kvferry_operator_reconcile_seconds_count" in page
    assert "_created" not in page
