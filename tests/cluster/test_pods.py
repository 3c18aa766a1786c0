"""The chart and the documented pool on a real node: installation, requests, upgrade, removal."""

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.kernels.lora_files import write
from harness.pools import on_node
from harness.pools.on_node import MODEL, PoolOnNode, eventually
from harness.servers.redis_server import RedisServer, redis_server
from openai import OpenAI

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is a ferry? Answer in one sentence, and name a sea that one crosses."}]
LONG = "The ferry left the harbour before the fog had lifted, and nobody on the pier could say who had steered it. " * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def alone(operated: Any) -> Callable[[list[int]], list[int]]:
    """A function that returns the answer of one engine that prefills and decodes."""
    engine = LLM(MODEL, dtype="float32", kv_memory=64 << 20)
    return lambda prompt: list(engine.generate([prompt], GREEDY)[0].token_ids)


@pytest.fixture
def pool(operated: Any, namespace: str) -> Iterator[PoolOnNode]:
    made = PoolOnNode(operated.cluster, namespace)
    yield made
    made.kubectl("delete", "kvpool", made.name, "--ignore-not-found")


def test_the_documented_pool_answers_with_one_engines_tokens(
    pool: PoolOnNode, alone: Callable[[list[int]], list[int]], say: Callable[[str], None]
) -> None:
    pool.apply()
    pool.wait_ready()
    say("docs/examples/pool.yaml is ready, connector nixl")
    check_answers(pool, alone, "nixl")
    say("asked by openai and by kvferry.client: one engine's tokens, KV fetched")
    header, row = pool.kubectl("get", "kvpool").splitlines()
    assert header.split() == ["NAME", "READY", "AVAILABLE", "PREFILL", "DECODE", "BOTH", "MODEL", "AGE"]
    assert row.split()[:6] == ["chat", "True", "True", "1/1", "1/1", MODEL]
    pool.patch(
        {"op": "replace", "path": "/spec/connector/type", "value": "tcp"},
        {"op": "replace", "path": "/spec/roles/1/parallelism", "value": {"tensor": 3}},
    )
    pool.wait_ready()
    say("rolled over to connector tcp, and to three ranks per decode worker")
    check_answers(pool, alone, "tcp")
    say("asked again: one engine's tokens, KV fetched")
    check_adapters(pool, say)


def conditions(pool: PoolOnNode) -> dict[str, dict[str, Any]]:
    return {one["type"]: one for one in pool.get().get("status", {}).get("conditions", [])}


def with_kv_memory(pool: PoolOnNode, size: str) -> None:
    pool.patch(*({"op": "replace", "path": f"/spec/roles/{i}/engine/kvMemory", "value": size} for i in (0, 1)))


def test_too_little_kv_memory_is_reported_and_lost_keys_are_replaced(
    pool: PoolOnNode, alone: Callable[[list[int]], list[int]], say: Callable[[str], None]
) -> None:
    pool.apply({"spec": {"connector": {"type": "tcp"}}})
    pool.wait_ready()
    with_kv_memory(pool, "64Mi")
    pool.wait_ready()
    with OpenAI(base_url=pool.http, api_key="none", timeout=60) as openai:
        (card,) = openai.models.list().data
    held = int((card.model_extra or {})["max_model_len"])
    assert 1024 <= held < 2048
    eventually(lambda: conditions(pool)["ContextAvailable"]["status"] == "False", "the condition ContextAvailable", 30)
    assert f"requests can have only {held:,} of 8,192 tokens" in conditions(pool)["ContextAvailable"]["message"]
    say(f"64Mi: advertised {held} tokens, ContextAvailable is False")
    with_kv_memory(pool, "3Mi")
    eventually(lambda: "needs 1,024" in conditions(pool)["Ready"]["message"], "the reason is in Ready", 120)
    assert {kind: conditions(pool)[kind]["status"] for kind in ("Ready", "Available")} == {
        "Ready": "False",
        "Available": "True",
    }
    say(f"3Mi: {conditions(pool)['Ready']['message']}")
    with_kv_memory(pool, "256Mi")
    before = pool.wait_ready()["status"]
    uid = pool.kubectl("get", "secret", "chat-keys", "-o", "jsonpath={.metadata.uid}")
    pool.kubectl("delete", "secret", "chat-keys")
    eventually(lambda: pool.get()["status"].get("keys") not in (None, before.get("keys")), "new keys", 20)
    assert pool.kubectl("get", "secret", "chat-keys", "-o", "jsonpath={.metadata.uid}") != uid
    pool.until(lambda found: found["status"]["revision"] != before["revision"], "the rollout has begun", 30)
    pool.wait_ready()
    say("keys were generated again and all pods replaced")
    check_answers(pool, alone, "tcp")


def check_answers(pool: PoolOnNode, alone: Callable[[list[int]], list[int]], connector: str) -> None:
    """Check the answers of both clients. A gateway polls its workers twice per second, so the decode pod may compute
    the first request after a rollout alone and then has its prompt cached; each attempt therefore has another prompt.
    """
    with Client(pool.grpc, timeout=60) as client:
        handoffs: list[tuple[str, str]] = []
        question, expected = QUESTION, list[int]()

        def fetched() -> bool:
            nonlocal question, expected
            question = [*QUESTION[:-1], {**QUESTION[-1], "content": f"{QUESTION[-1]['content']} ({len(handoffs)})"}]
            expected = alone(client.tokenize(question))
            chunks = list(client.generate(question, GREEDY))
            assert [token.token_id for chunk in chunks for token in chunk.tokens] == expected
            assert chunks[-1].timing is not None
            handoffs.append((chunks[-1].timing.handoff_outcome, chunks[-1].timing.connector))
            return handoffs[-1] == ("fetched", connector)

        eventually(fetched, "KV is fetched", 20.0, lambda: str(handoffs))
        text = client.detokenize(expected)
    with OpenAI(base_url=pool.http, api_key="none", timeout=60) as openai:
        answer = openai.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == text


def check_adapters(pool: PoolOnNode, say: Callable[[str], None]) -> None:
    """Check that adapters of the spec are served, changed and removed without a restart of the workers."""
    folder = pool.cluster.folder / "models" / "adapters" / "support"
    engine = LLM(MODEL, dtype="float32", kv_memory=64 << 20)
    write(folder, engine.config)
    for file in folder.iterdir():
        file.chmod(0o644)  # pods run as another user
    engine.load_adapter("support", str(folder))
    before = {role: pool.pods(role) for role in ("prefill", "decode")}
    missing = {"name": "missing", "source": "/models/adapters/missing"}
    support = {"name": "support", "source": "/models/adapters/support"}
    pool.patch({"op": "add", "path": "/spec/adapters", "value": [support, missing]})
    eventually(lambda: "adapter_config.json" in adapters_loaded(pool), "the missing folder is reported", 60)
    say(adapters_loaded(pool))
    pool.patch({"op": "remove", "path": "/spec/adapters/1"})
    eventually(lambda: adapters_loaded(pool) == "2 workers serve 1 adapters", "the adapter is served", 60)
    with Client(pool.grpc, timeout=60) as client:
        prompt = client.tokenize(QUESTION)
        expected = list(engine.generate([prompt], GREEDY, model="support")[0].token_ids)
        chunks = list(client.generate(QUESTION, GREEDY, model="support"))
        assert [token.token_id for chunk in chunks for token in chunk.tokens] == expected
    pool.patch({"op": "remove", "path": "/spec/adapters"})
    with OpenAI(base_url=pool.http, api_key="none", timeout=60) as openai:
        eventually(lambda: len(openai.models.list().data) == 1, "the adapter is removed", 60)
    assert {role: pool.pods(role) for role in ("prefill", "decode")} == before
    say("an adapter was loaded, served and removed, and no pod was replaced")


def adapters_loaded(pool: PoolOnNode) -> str:
    return str(conditions(pool).get("AdaptersLoaded", {}).get("message", ""))


def test_kubectl_explains_every_level(operated: Any) -> None:
    explanation = operated.kubectl("explain", "kvpool.spec.roles")
    assert "Role prefill computes prompts, role decode generates" in " ".join(explanation.split())
    assert "engine" in operated.kubectl("explain", "kvpool.spec", "--recursive")


def test_pods_share_kv_through_a_redis_that_a_secret_names(pool: PoolOnNode, say: Callable[[str], None]) -> None:
    near = pool.cluster.box.near_address
    with redis_server(address=near, acl=["default off", "worker on >secret ~* &* +@all"]) as redis:
        url = f"redis://worker:secret@{near}:{redis.port}/0"
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "tier"},
            "data": {"url": base64.b64encode(url.encode()).decode()},
        }
        pool.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
        tiers = [{"type": "redis", "urlSecret": {"name": "tier"}}]
        pool.apply({"spec": {"tiers": tiers, "connector": {"type": "tcp"}}})
        pool.wait_ready()
        assert ask(pool).handoff_outcome == "fetched"
        eventually(lambda: keys_in(redis) > 0, "blocks have reached Redis", 30)
        say(f"{keys_in(redis)} blocks in Redis")
        for role in ("prefill", "decode"):  # new pods have empty caches, so KV can come from Redis only
            pool.kubectl("delete", "pod", *pool.pods(role), "--wait=false")
        pool.wait_pods("prefill", 1)
        pool.wait_pods("decode", 1)
        pool.wait_ready()
        eventually(lambda: "redis" in sources(pool), "a new pod loads from Redis", 60)
        say("new pods have loaded them")


def ask(pool: PoolOnNode) -> Any:
    with Client(pool.grpc, timeout=90) as client:
        chunks = list(client.generate(LONG, GREEDY))
    return chunks[-1].timing


def sources(pool: PoolOnNode) -> set[str]:
    return {report.source for report in ask(pool).kv if report.blocks_loaded}


def keys_in(redis: RedisServer) -> int:
    size = redis.ask(b"DBSIZE", user=("worker", "secret"))
    assert isinstance(size, int)
    return size


def test_the_release_is_tested_and_upgraded(operated: Any, pool: PoolOnNode, say: Callable[[str], None]) -> None:
    assert "Succeeded" in operated.cluster.helm("test", "kvferry", "-n", "kvferry", "--timeout=60s")
    say("helm test: an operator leads")
    upgrade = ("upgrade", "kvferry", on_node.CHART, "-n", "kvferry", "-f", on_node.VALUES, "--wait", "--timeout=120s")
    changed = ("--set", "operator.replicas=1", "--set", "operator.logLevel=debug", "--set", "operator.leaseSeconds=10")
    operated.cluster.helm(*upgrade, *changed)
    say("helm upgrade: other values")
    arguments = ("get", "deployment", "kvferry-operator", "-n", "kvferry", "-o", "jsonpath={.spec.template.spec}")
    assert "--lease-seconds=10" in operated.kubectl(*arguments)
    assert "Succeeded" in operated.cluster.helm("test", "kvferry", "-n", "kvferry", "--timeout=60s")
    pool.apply()
    pool.until(lambda found: bool(found.get("status")), "the upgraded operator looks after pools", 60)


def test_deletion_of_pools_and_release_completes(
    operated: Any, kube_node: Any, say: Callable[[str], None], alone: Callable[[list[int]], list[int]]
) -> None:
    """This test must be the last one here, because it removes the release that the others use."""
    left, gone = PoolOnNode(operated.cluster, "left"), PoolOnNode(operated.cluster, "gone")
    for one in (left, gone):
        operated.kubectl("create", "namespace", one.namespace)
        one.apply({"spec": {"connector": {"type": "tcp"}, "gateway": {"replicas": 1}}})
    for one in (left, gone):
        one.wait_ready()
    say("two pools are ready")
    gone.kubectl("delete", "kvpool", gone.name, "--timeout=60s")
    kinds = "deployments,services,poolrolescalers,networkpolicies,poddisruptionbudgets,secrets,controllerrevisions"
    kinds += ",serviceaccounts,roles,rolebindings"
    selector = ("-l", "kvferry.dev/pool=chat", "-o", "name")
    eventually(lambda: gone.kubectl("get", f"{kinds},pods", *selector) == "", "nothing of the pool is left", 90)
    say("a deleted pool has left nothing")
    operated.cluster.helm("uninstall", "kvferry", "-n", "kvferry", "--wait", "--timeout=60s")
    operated.kubectl("delete", "namespace", "kvferry", "--timeout=90s")
    say("helm uninstall: the operator is gone")
    check_answers(left, alone, "tcp")
    assert operated.kubectl("get", "crd", "inferencepools.kvferry.dev", "-o", "name"), (
        "the definitions are kept, and the pools with them"
    )
    say("the other pool serves on")
    operated.kubectl("delete", "namespace", left.namespace, gone.namespace, "--timeout=120s")
    say("its namespace could be deleted without an operator")
