"""A pool's plan and its execution: idempotent, in order, and without changes to objects of other owners."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.operator.fake_cluster import KEY, Cluster
from unit.operator.pools import IMAGE, body, made_of, pool

from kvferry.core.errors import Unavailable
from kvferry.core.load import WorkerLoad
from kvferry.operator.api import ApiRefusal
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.objects.worker_pods import deployments, revision_of
from kvferry.operator.plan.actions import CreateKeys, EmitEvent, WriteStatus, as_json
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.plan.memory import PassMemory
from kvferry.operator.plan.pool_plan import plan_pool
from kvferry.operator.plan.pool_report import again_seconds
from kvferry.operator.plan.revisions import record
from kvferry.operator.plan.template_policy import TemplatePolicy
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import FleetReport, PoolFacts, WorkerReport
from kvferry.operator.pool.spec import parse_pool
from kvferry.operator.preview.preview import preview

OPTIONAL = frozenset({POD_MONITOR, EXTENSION_POOL})


def roles_with(**decode: Any) -> list[dict[str, Any]]:
    return [{"name": "prefill"}, {"name": "decode", **decode}]


def specs() -> st.SearchStrategy[dict[str, Any]]:
    count = st.integers(0, 4)
    scaling = st.sampled_from([{}, {"mode": "External"}, {"mode": "Auto", "minReplicas": 0}])
    role = st.builds(lambda n, s: {"scaling": s} if s else {"replicas": n}, count, scaling)
    pair = st.builds(lambda p, d: [{"name": "prefill", **p}, {"name": "decode", **d}], role, role)
    both = st.builds(lambda b: [{"name": "both", **b}], role)
    return st.fixed_dictionaries(
        {
            "roles": st.one_of(pair, both),
            "model": st.builds(lambda n: {"name": "m", "maxModelLen": n}, st.integers(0, 3)),
            "networkPolicy": st.sampled_from(["Restricted", "Off"]),
            "observability": st.builds(lambda m: {"podMonitor": m}, st.sampled_from(["Auto", "Off"])),
            "gateway": st.builds(
                lambda n, e: {"replicas": n, "inferenceExtension": e}, count, st.sampled_from(["Auto", "Off"])
            ),
            "rollout": st.builds(lambda n: {"historyLimit": n}, st.integers(0, 2)),
        }
    )


SLOW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(st.lists(specs(), min_size=1, max_size=4))
def test_a_settled_pool_has_an_empty_plan_and_a_restarted_operator_changes_nothing(versions):
    cluster = Cluster(OPTIONAL, **versions[0])
    cluster.settle()
    for spec in versions[1:]:
        cluster.change(**spec)
        cluster.settle()
    assert cluster.reconcile() == []
    before = {place: state_of(held) for place, held in cluster.api.objects.items()}
    cluster.reconciler._memories.clear()
    cluster.settle()
    assert {place: state_of(held) for place, held in cluster.api.objects.items()} == before


def state_of(held: dict[str, Any]) -> Any:
    """Return the part of an object that must not change: the spec of a pool, and all of other objects."""
    if held["kind"] == "InferencePool" and held["apiVersion"] == names.API_VERSION:
        return held["spec"]
    return copy.deepcopy(held)


def foreign_objects() -> list[dict[str, Any]]:
    """Return an object of another owner in the place of every object that a pool could have."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for spec in ({}, {"roles": [{"name": "both"}]}):
        made = pool(**spec, gateway={"inferenceExtension": "Auto"})
        for thing in made_of(made).values():
            if "kind" in thing:
                found[thing["kind"], thing["metadata"]["name"]] = copy.deepcopy(thing)
        revision = revision_of(made, IMAGE)
        kept = deployments(made, revision, IMAGE)
        for thing in (record(made, revision, 1, kept), *kept.values()):
            found[thing["kind"], thing["metadata"]["name"]] = copy.deepcopy(thing)
    return list(found.values())


@SLOW
@given(
    st.lists(st.integers(0, len(foreign_objects()) - 1), unique=True, min_size=1),
    st.sampled_from([[], [{"uid": "another", "kind": "InferencePool", "name": "other", "controller": True}]]),
    st.lists(specs(), min_size=1, max_size=3),
)
def test_objects_of_other_owners_are_neither_deleted_nor_changed(chosen, owners, versions):
    cluster = Cluster(OPTIONAL, **versions[0])
    foreign = []
    for i in chosen:
        thing = foreign_objects()[i]
        thing["metadata"]["ownerReferences"] = owners
        cluster.api.add(thing)
        foreign.append((thing["apiVersion"], thing["kind"], thing["metadata"]["name"]))
    before = {place: copy.deepcopy(cluster.api.objects[place]) for place in foreign}
    for spec in versions:
        cluster.change(**spec)
        for _ in range(6):
            cluster.reconcile()
            for place in set(cluster.api.objects) - set(foreign):
                held = cluster.api.objects[place]
                if place[1] == "Deployment":
                    n = held["spec"].get("replicas", 1)
                    held["status"] = {"observedGeneration": held["metadata"]["generation"], "replicas": n} | {
                        "readyReplicas": n,
                        "updatedReplicas": n,
                    }
    assert {place: cluster.api.objects[place] for place in foreign} == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"model": {"name": "m", "maxModelLen": 9}}),
        ({}, {"roles": roles_with(replicas=4), "networkPolicy": "Off"}),
        ({"roles": roles_with(replicas=3)}, {"roles": roles_with(scaling={"mode": "External"})}),
        ({}, {"roles": [{"name": "both", "replicas": 2}]}),
    ],
)
def test_the_preview_lists_the_actions_of_the_executor(old, new):
    cluster = Cluster(OPTIONAL, **old)
    cluster.settle()
    cluster.change(**new)
    cluster.executor.actions.clear()
    cluster.settle()
    written = [
        [a.summary for a in actions if not (isinstance(a, WriteStatus) and "InferencePool" in a.target)]
        for actions in cluster.executor.actions[::2]
    ]
    expected = preview(pool(**old), pool(**new), IMAGE)
    assert [actions for actions in written if actions] == [[a.summary for a in actions] for actions in expected.passes]


def test_a_preview_shows_no_keys_and_all_fields():
    cluster = Cluster()
    cluster.settle()
    (create,) = (a for actions in cluster.executor.actions for a in actions if isinstance(a, CreateKeys))
    assert "data" not in as_json(create)["manifest"]
    assert len(set(cluster.api.objects["v1", "Secret", "chat-keys"]["data"].values())) == 4


def test_a_static_number_with_another_owner_is_followed_in_the_same_pass():
    cluster = Cluster(roles=roles_with(replicas=2))
    cluster.settle()
    place = (names.API_VERSION, "PoolRoleScaler", "chat-decode")
    cluster.api.objects[place]["spec"]["replicas"] = 3
    cluster.api.objects[place]["metadata"]["generation"] += 1
    cluster.api.replica_owners[place] = "kubectl"
    cluster.reconcile()
    assert cluster.replicas("Deployment")[f"chat-decode-{cluster.body['status']['revision']}"] == 3
    status, reason, message = cluster.condition("ReplicasContested")
    assert (status, reason, "kubectl owns spec.replicas" in message) == ("True", "OtherManager", True)
    assert cluster.condition("ChildrenApplied")[0] == "True"
    assert cluster.again == 5.0
    assert cluster.api.objects[place]["spec"]["replicas"] == 3


def test_a_change_of_mode_seeds_the_current_number_and_keeps_it():
    cluster = Cluster(roles=roles_with(replicas=3))
    cluster.settle()
    cluster.change(roles=roles_with(scaling={"mode": "External"}))
    cluster.settle()
    assert cluster.replicas("PoolRoleScaler")["chat-decode"] == 3
    assert cluster.api.replica_owners[names.API_VERSION, "PoolRoleScaler", "chat-decode"] == names.SEED_MANAGER


@pytest.mark.parametrize("mode", ["External", "Auto"])
def test_a_new_scaler_belongs_to_the_pool_and_its_number_to_the_seed(mode):
    cluster = Cluster(roles=roles_with(scaling={"mode": mode, "minReplicas": 2}))
    cluster.settle()
    place = (names.API_VERSION, "PoolRoleScaler", "chat-decode")
    assert cluster.api.objects[place]["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert cluster.api.replica_owners[place] == names.SEED_MANAGER
    assert cluster.replicas("PoolRoleScaler")["chat-decode"] == 2
    assert cluster.condition("ChildrenApplied")[0] == "True"


@pytest.mark.parametrize("mode", ["External", "Auto"])
@pytest.mark.parametrize("ran", [0, 5])
def test_a_deleted_scaler_is_restored_with_the_number_of_pods_that_ran(mode, ran):
    cluster = Cluster(roles=roles_with(scaling={"mode": mode, "minReplicas": 0, "maxReplicas": 9}))
    cluster.settle()
    place = (names.API_VERSION, "PoolRoleScaler", "chat-decode")
    cluster.api.objects[place]["spec"]["replicas"] = ran
    cluster.api.replica_owners[place] = "hpa"
    cluster.settle()
    name = f"chat-decode-{cluster.body['status']['revision']}"
    assert cluster.replicas("Deployment")[name] == ran
    for restart in (False, True):
        if restart:
            cluster.restart()
        del cluster.api.objects[place], cluster.api.replica_owners[place]
        cluster.settle()
        assert cluster.replicas("PoolRoleScaler")["chat-decode"] == ran
        assert cluster.replicas("Deployment")[name] == ran


def test_the_autoscaler_writes_under_its_own_manager_and_a_refusal_keeps_the_number():
    auto = {"mode": "Auto", "targetRequests": 1, "maxReplicas": 9}
    cluster = Cluster(roles=roles_with(scaling=auto))
    cluster.settle()
    place = (names.API_VERSION, "PoolRoleScaler", "chat-decode")
    busy = WorkerReport("d", "decode", takes_work=True, load=WorkerLoad(running=4, blocks_total=10, blocks_free=10))
    cluster.report = FleetReport(cluster.clock.now + 1, (busy,))
    cluster.api.refuse = {"PoolRoleScaler"}
    cluster.reconcile()
    assert cluster.condition("ChildrenApplied")[1] == "Refused"
    assert cluster.replicas("PoolRoleScaler")["chat-decode"] == 1
    cluster.api.refuse = set()
    cluster.reconcile()
    assert cluster.replicas("PoolRoleScaler")["chat-decode"] == 4
    assert cluster.api.replica_owners[place] == names.AUTOSCALER_MANAGER
    assert cluster.body["status"]["scaling"][0]["to"] == 4


def events_of(cluster: Cluster, passes: int = 1) -> list[EmitEvent]:
    """Return the events of the next passes."""
    before = len(cluster.executor.actions)
    for _ in range(passes):
        cluster.reconcile()
    return [a for actions in cluster.executor.actions[before:] for a in actions if isinstance(a, EmitEvent)]


def test_a_pool_without_the_secret_of_its_keys_gets_new_ones_with_an_event():
    cluster = Cluster()
    assert events_of(cluster)[0].reason == "KeysGenerated"
    cluster.settle()
    del cluster.api.objects["v1", "Secret", "chat-keys"]
    event = events_of(cluster)[0]
    assert (event.type, event.reason) == ("Warning", "KeysReplaced")
    assert event.message.startswith("Secret chat-keys was lost: new keys were generated, and all pods are replaced")


def test_objects_that_were_deleted_are_restored_with_one_event():
    cluster = Cluster()
    cluster.settle()
    for kind, name in (("Service", "chat"), ("Service", "chat-decode"), ("ServiceAccount", "chat-worker")):
        del cluster.api.objects["v1", kind, name]
    del cluster.api.objects["policy/v1", "PodDisruptionBudget", "chat-decode"]
    (event,) = events_of(cluster)
    assert (event.type, event.reason) == ("Normal", "Restored")
    assert event.message.startswith("created again, since it was deleted: ")
    assert event.message.endswith(" and 1 more")
    assert events_of(cluster, 3) == []
    cluster.change(networkPolicy="Off")
    cluster.settle()
    cluster.change(networkPolicy="Restricted")
    assert "Restored" not in {event.reason for event in events_of(cluster, 3)}


def test_a_number_of_a_static_role_that_nobody_owns_is_reset_with_an_event():
    cluster = Cluster(roles=roles_with(replicas=2))
    cluster.settle()
    place = (names.API_VERSION, "PoolRoleScaler", "chat-decode")
    cluster.api.objects[place]["spec"]["replicas"] = 0
    cluster.api.objects[place]["metadata"]["generation"] += 1
    (event,) = [event for event in events_of(cluster) if event.reason == "ReplicasReset"]
    assert event.type == "Warning"
    assert "spec.replicas was set to 0, but role decode has scaling.mode Static" in event.message
    assert cluster.replicas("PoolRoleScaler")["chat-decode"] == 2
    cluster.change(roles=roles_with(replicas=3))
    assert "ReplicasReset" not in {event.reason for event in events_of(cluster, 2)}


def test_every_rejected_object_is_named_and_an_event_names_its_condition_once():
    cluster = Cluster()
    cluster.settle()
    cluster.api.refuse = {"Service"}
    for name in ("chat", "chat-decode", "chat-prefill"):
        del cluster.api.objects["v1", "Service", name]
    (event,) = events_of(cluster)
    assert (event.type, event.reason) == ("Warning", "Refused")
    assert event.message.startswith("ChildrenApplied is False: Service chat: not allowed. Also affected: Service chat-")
    for name in ("chat", "chat-decode", "chat-prefill"):
        assert f"Service {name}" in cluster.condition("ChildrenApplied")[2]


def test_an_updated_gateway_pod_that_is_not_ready_is_not_counted():
    cluster = Cluster(gateway={"replicas": 2})
    cluster.settle()
    place = ("apps/v1", "Deployment", "chat-gateway")

    def waits(**status: int) -> str:
        cluster.api.objects[place]["status"] |= status
        cluster.reconcile()
        return cluster.condition("Progressing")[2]

    assert waits(replicas=3, readyReplicas=2, updatedReplicas=1) == (
        "gateway: 0 of 2 pods updated and ready, 2 old pods left"
    )
    assert waits(readyReplicas=3) == "gateway: 1 of 2 pods updated and ready, 2 old pods left"
    assert waits(replicas=3, updatedReplicas=3) == "gateway: 1 more pods than desired"
    assert waits(replicas=2, readyReplicas=1, updatedReplicas=2) == "gateway: 1 of 2 pods ready"
    cluster.api.objects[place]["metadata"]["generation"] += 1
    assert waits(readyReplicas=2) == "gateway: the Deployment controller has not observed the last change yet"


def test_conditions_follow_the_last_report_until_a_newer_one_is_overdue():
    cluster = Cluster()
    cluster.settle()
    workers = tuple(
        WorkerReport(role, role, takes_work=True, fingerprint="f", family="g") for role in ("prefill", "decode")
    )
    cluster.report = FleetReport(cluster.clock.now, workers)
    cluster.settle()
    assert cluster.condition("Ready")[0] == "True"
    cluster.change(drain={"lingerSeconds": 7})
    cluster.reconcile()
    cluster.settle()
    assert cluster.condition("ModelAvailable")[0] == cluster.condition("PairingCompatible")[0] == "True"
    assert cluster.condition("Ready")[:2] == ("False", "NotAllReady")
    cluster.report = FleetReport(cluster.clock.now, workers)
    cluster.reconcile()
    assert cluster.condition("Ready")[0] == "True"
    cluster.report = FleetReport(0.0, workers)
    cluster.clock.now += 60
    cluster.reconcile()
    assert cluster.condition("ModelAvailable")[:2] == ("Unknown", "GatewayReportMissing")


def test_a_failure_in_the_middle_repeats_nothing_that_was_done():
    whole, broken = Cluster(), Cluster()
    whole.settle()
    broken.api.fail_after = 9
    with pytest.raises(Unavailable):
        broken.reconcile()
    broken.api.fail_after = -1
    broken.settle()
    assert sorted(broken.api.writes) == sorted(whole.api.writes)


def test_every_refusal_becomes_a_condition_and_keeps_no_other_object_back():
    cluster = Cluster(networkPolicy="Off")
    cluster.api.refuse = {"Service", "PodDisruptionBudget", "NetworkPolicy"}
    for _ in range(3):
        cluster.reconcile()
        cluster.become_ready()
    assert cluster.condition("ChildrenApplied")[:2] == ("False", "Refused")
    assert cluster.condition("RolesReady")[0] == "True"
    assert cluster.again == 5.0


def test_a_refused_status_fails_the_pass():
    cluster = Cluster()
    cluster.api.refuse = {"InferencePool"}
    with pytest.raises(ApiRefusal):
        cluster.reconcile()


def test_a_refused_record_creates_no_pods():
    cluster = Cluster()
    cluster.api.refuse = {"ControllerRevision"}
    cluster.reconcile()
    assert set(cluster.replicas("Deployment")) == {"chat-gateway"}
    assert cluster.condition("ChildrenApplied")[:2] == ("False", "Refused")


def test_a_spec_that_cannot_be_read_is_reported_once():
    cluster = Cluster()
    cluster.settle()
    cluster.body["spec"]["roles"] = "none"
    cluster.body["metadata"]["generation"] += 1
    assert cluster.reconcile() == ["apply InferencePool chat"]
    assert cluster.condition("Ready")[1] == "InvalidSpec"
    assert cluster.reconcile() == []


def test_a_template_that_the_operator_does_not_permit_is_reported_and_changes_nothing():
    cluster = Cluster()
    cluster.settle()
    cluster.template_policy = TemplatePolicy.RESTRICTED
    cluster.restart()
    cluster.settle()
    before = cluster.replicas("Deployment")
    roles = [{"name": "prefill", "template": {"spec": {"hostPID": True}}}, {"name": "decode"}]
    cluster.change(roles=roles)
    assert cluster.reconcile() == ["apply InferencePool chat"]
    assert cluster.condition("Ready")[1] == "InvalidSpec"
    assert "roles[prefill].template.spec.hostPID is not permitted" in cluster.condition("Ready")[2]
    assert cluster.replicas("Deployment") == before


def test_a_pool_that_is_being_deleted_is_left_to_the_garbage_collector():
    cluster = Cluster()
    cluster.body["metadata"]["deletionTimestamp"] = "now"
    assert cluster.reconcile() == []
    del cluster.api.objects[names.API_VERSION, "InferencePool", "chat"]
    assert cluster.reconcile() == []
    assert KEY not in cluster.reconciler._memories


def test_a_first_plan_writes_the_record_before_its_deployments():
    made = parse_pool(body())
    ctx = PlanContext(
        pool=made,
        facts=PoolFacts(),
        memory=PassMemory(made.uid, 0.0, 0.0, 0.0),
        next_record=1,
        status={},
        default_image=IMAGE,
        installed=OPTIONAL,
        now=0.0,
        stamp="now",
    )
    plan = plan_pool(ctx)
    order = [action.target for action in plan.actions]
    assert order[0] == "status of InferencePool chat"
    revision = plan.revision
    assert order.index(f"ControllerRevision chat-{revision}") < order.index(f"Deployment chat-decode-{revision}")
    assert order.index("PoolRoleScaler chat-decode") < order.index(f"ControllerRevision chat-{revision}")
    assert plan_pool(ctx) == plan


def test_a_settled_pool_has_one_pass_per_minute():
    memory = PassMemory("u-1", 0.0, 0.0)
    ctx = PlanContext(pool(), PoolFacts(), memory, 0, {}, IMAGE, frozenset(), 100.0, "now")
    assert again_seconds(ctx, memory, "", is_refused=False) == 60.0
    assert again_seconds(ctx, memory, "pods", is_refused=False) == 5.0


def test_every_object_that_is_deleted_is_written_again_at_the_next_pass():
    cluster = Cluster(OPTIONAL, gateway={"inferenceExtension": "Auto"})
    cluster.settle()
    children = [place for place in cluster.api.objects if place[:2] != (names.API_VERSION, "InferencePool")]
    assert len({kind for _, kind, _ in children}) == 13
    for place in sorted(children, key=lambda place: place[1] == "Secret"):  # last, as new keys replace Deployments
        del cluster.api.objects[place]
        cluster.reconcile()
        assert place in cluster.api.objects, place
        cluster.settle()


def test_the_time_of_the_observation_is_written_with_every_change_and_once_a_minute():
    cluster = Cluster()
    cluster.settle()
    first = cluster.body["status"]["observedAt"]
    cluster.clock.now += 30
    assert cluster.reconcile() == []
    cluster.clock.now += 30
    assert cluster.reconcile() == ["apply InferencePool chat"]
    assert cluster.body["status"]["observedAt"] > first
    assert cluster.reconcile() == []


def test_lost_keys_are_generated_again_and_replace_all_pods_once():
    cluster = Cluster()
    cluster.settle()
    first = cluster.body["status"]["revision"]
    assert "keys" not in cluster.body["status"]
    del cluster.api.objects["v1", "Secret", "chat-keys"]
    assert "create Secret chat-keys" in cluster.reconcile()
    assert cluster.again == 0
    cluster.settle()
    status = cluster.body["status"]
    assert status["keys"]
    assert status["revision"] != first
    assert set(cluster.replicas("Deployment")) == {
        "chat-gateway",
        *(f"chat-{role}-{status['revision']}" for role in ("prefill", "decode")),
    }
    for (_, kind, _), made in cluster.api.objects.items():
        if kind == "Deployment":
            assert made["spec"]["template"]["metadata"]["annotations"] == {names.ANNOTATION_KEYS: status["keys"]}
    cluster.reconciler._memories.clear()
    cluster.settle()
    assert cluster.body["status"]["revision"] == status["revision"]
    cluster.body["spec"]["roles"] = "unreadable"
    cluster.body["metadata"]["generation"] += 1
    cluster.reconcile()
    assert cluster.body["status"]["keys"] == status["keys"]


def test_a_pool_whose_gateway_loses_its_labels_stays_available():
    cluster = Cluster()
    workers = tuple(WorkerReport(role, role, takes_work=True, fingerprint="f") for role in ("prefill", "decode"))
    cluster.settle()
    cluster.report = FleetReport(cluster.clock.now, workers)
    cluster.reconcile()
    assert cluster.condition("Available")[:2] == ("True", "Serving")
    place = ("apps/v1", "Deployment", "chat-gateway")
    labels = cluster.api.objects[place]["metadata"].pop("labels")
    cluster.clock.now += 10
    cluster.reconcile()
    assert cluster.condition("Available")[:2] == ("True", "Serving")
    assert cluster.api.objects[place]["metadata"]["labels"] == labels
    cluster.api.objects[place]["status"]["readyReplicas"] = 0
    cluster.reconcile()
    assert cluster.condition("Available")[:2] == ("False", "NoGatewayPodReady")
