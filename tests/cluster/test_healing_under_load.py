"""A random child of a pool is deleted or edited every second while requests flow: each is restored within seconds, no
request is lost or wrong, and the condition ChildrenApplied is not True while a child is missing.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from cluster.operators import an_operator
from harness.pools.load import CLOCK, Load, Outcome, Question, questions
from harness.pools.on_node import MODEL, PoolOnNode

from kvferry.core.errors import KvferryError
from kvferry.core.process.config import environment
from kvferry.engine import LLM
from kvferry.operator.api import KubeApi
from kvferry.operator.pool.names import LABEL_POOL

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.long, pytest.mark.timeout(1200)]

SECONDS = float(environment().get("KVFERRY_HEALING_SECONDS", "300"))
HEALED_SECONDS = 5.0
IMAGE = "localhost/kvferry-host:1"
CLAIM_SECONDS = 3.0
"""Seconds after the loss of a child from which ChildrenApplied must not be True."""
EDITED_ONLY = ("Deployment",)
"""Kinds that are edited and not deleted, because a deletion would end their pods. The client Service is not changed,
because a new one would have another address.
"""
RBAC = "rbac.authorization.k8s.io/v1"
VICTIMS = (
    ("apps/v1", "Deployment", "chat-gateway"),
    ("v1", "Service", "chat-prefill"),
    ("v1", "Service", "chat-decode"),
    ("v1", "Service", "chat-gateway"),
    ("v1", "ServiceAccount", "chat-worker"),
    ("v1", "ConfigMap", "chat-adapters"),
    (RBAC, "Role", "chat-gateway"),
    (RBAC, "RoleBinding", "chat-gateway"),
    ("policy/v1", "PodDisruptionBudget", "chat-prefill"),
    ("policy/v1", "PodDisruptionBudget", "chat-decode"),
    ("networking.k8s.io/v1", "NetworkPolicy", "chat-workers"),
    ("kvferry.dev/v1alpha1", "PoolRoleScaler", "chat-prefill"),
    ("kvferry.dev/v1alpha1", "PoolRoleScaler", "chat-decode"),
)
Victim = tuple[str, str, str]


@dataclass
class Healing:
    """Losses and restorations of children, and the status during them."""

    api: KubeApi
    namespace: str
    away: dict[Victim, float] = field(default_factory=dict)
    took: list[tuple[float, str]] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    ends: threading.Event = field(default_factory=threading.Event)

    def hurt(self, victim: Victim, rng: random.Random) -> None:
        api_version, kind, name = victim
        how = rng.choice(("label", "owner") if kind in EDITED_ONLY else ("delete", "label", "owner"))
        before = self.api.get(api_version, kind, self.namespace, name)
        assert before is not None, victim
        uid = before["metadata"]["uid"]
        self.away[victim] = begun = CLOCK.monotonic()
        if how == "delete":
            self.api.delete(api_version, kind, self.namespace, name)
        else:
            change = {"labels": {LABEL_POOL: None}} if how == "label" else {"ownerReferences": None}
            self.api.patch(api_version, kind, self.namespace, name, {"metadata": change}, manager="test")
        threading.Thread(target=self._watch, args=(victim, how, uid, begun), daemon=True).start()

    def _watch(self, victim: Victim, how: str, uid: str, begun: float) -> None:
        api_version, kind, name = victim
        while not self.ends.wait(0.05):
            try:
                found = self.api.get(api_version, kind, self.namespace, name)
            except KvferryError:
                continue
            meta = {} if found is None else found["metadata"]
            is_new = how != "delete" or meta.get("uid") != uid
            if is_new and meta.get("ownerReferences") and LABEL_POOL in (meta.get("labels") or {}):
                self.took.append((CLOCK.monotonic() - begun, f"{kind} {name}: {how}"))
                del self.away[victim]
                return

    def read_status(self) -> None:
        """Compare the condition ChildrenApplied with the missing children, once per second."""
        while not self.ends.wait(1.0):
            pool = self.api.get("kvferry.dev/v1alpha1", "InferencePool", self.namespace, "chat")
            now = CLOCK.monotonic()
            assert pool is not None
            said = {one["type"]: one["status"] for one in pool["status"]["conditions"]}
            self.said[" ".join(f"{kind}={said[kind]}" for kind in ("ChildrenApplied", "Available", "Ready"))] += 1
            long = [victim for victim, since in list(self.away.items()) if now - since > CLAIM_SECONDS]
            if long and said["ChildrenApplied"] == "True":
                self.claims.append(f"ChildrenApplied is True while {long} are away")


@pytest.fixture
def pool(kube_node: Any, namespace: str, say: Callable[[str], None]) -> Iterator[PoolOnNode]:
    kube_node.cluster.keep_model(MODEL)
    kube_node.kubectl("apply", "--server-side", "-f", "charts/kvferry/files/crds")
    with an_operator(kube_node.kubeconfig, namespace, "--image", IMAGE):
        made = PoolOnNode(kube_node.cluster, namespace)
        made.apply({"spec": {"connector": {"type": "tcp"}}})
        made.wait_ready()
        say("the pool is ready")
        yield made


def test_children_are_restored_while_requests_flow(pool: PoolOnNode, say: Callable[[str], None]) -> None:
    question_list: list[Question] = questions(LLM(MODEL, dtype="float32", kv_memory=128 << 20))
    healing = Healing(KubeApi.connect(str(pool.cluster.kubeconfig)), pool.namespace)
    reader = threading.Thread(target=healing.read_status, daemon=True)
    rng = random.Random(7)
    record = ("apps/v1", "ControllerRevision", f"chat-{pool.get()['status']['revision']}")
    victims = (*VICTIMS, record)
    with Load(pool.http, MODEL, question_list) as load:
        load.flows(2)
        reader.start()
        begun, pause = CLOCK.monotonic(), threading.Event()
        hurt = 0
        while CLOCK.monotonic() - begun < SECONDS:
            free = [victim for victim in victims if victim not in healing.away]
            if free:
                healing.hurt(rng.choice(free), rng)
                hurt += 1
            pause.wait(1.0)
        load.flows(4)
        pause.wait(HEALED_SECONDS)
        left = dict(healing.away)
        healing.ends.set()
        ended = list(load.ended)
    outcomes = Counter(end.outcome for end in ended)
    slowest = max(healing.took)
    say(
        f"{hurt} children deleted or edited in {SECONDS:.0f} s; slowest restored after {slowest}; status {healing.said}"
    )
    say(f"requests: {dict(outcomes)}, slowest {max(end.seconds for end in ended):.1f} s")
    for end in ended:
        if end.outcome is not Outcome.RIGHT:
            say(f"    {end.outcome} at {end.began - begun:.1f} s, after {end.seconds:.1f} s: {end.note}")
    assert not left
    assert slowest[0] < HEALED_SECONDS
    assert healing.claims == []
    assert set(outcomes) == {Outcome.RIGHT}
