"""Every field of the definition has a visible effect and the definition's default."""

import tomllib
from typing import Any

import msgspec
import pytest
from unit.operator.definitions import POOL, SCALER, leaves, schema
from unit.operator.pools import body, made_of, pool

from kvferry.core.load import WorkerLoad
from kvferry.operator.plan.autoscale import Recommendations, decide
from kvferry.operator.plan.rollout import Bounds, Count, RoleState, next_step
from kvferry.operator.plan.status import Observed, status_of
from kvferry.operator.pool.facts import FleetReport, WorkerReport
from kvferry.operator.pool.spec import InferencePool, RoleSpec, parse_pool
from kvferry.operator.preview.definition import with_defaults

SPEC = schema()["properties"]["spec"]
WORKER = "Deployment/chat-prefill-REV"
GATEWAY = "Deployment/chat-gateway"


def dig(found: Any, path: str) -> Any:
    """Return the value at a path such as `a.b.0.c` in nested maps and lists."""
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part)
        if found is None:
            return None
    return found


def container(pool: InferencePool, of: str = WORKER) -> dict[str, Any]:
    return made_of(pool)[of]["spec"]["template"]["spec"]["containers"][0]


def projected(pool: InferencePool, of: str) -> dict[str, list[list[str]]]:
    """Return the keys and paths of the files of pool TLS, by the Secret or ConfigMap that contains them."""
    volumes = made_of(pool)[of]["spec"]["template"]["spec"]["volumes"]
    found: dict[str, list[list[str]]] = {}
    for volume in volumes:
        for source in volume.get("projected", {}).get("sources", ()):
            (kind,) = source.values()
            found.setdefault(kind["name"], []).extend([item["key"], item["path"]] for item in kind["items"])
    return found


def flag(name: str, of: str = WORKER):
    """Return the value of a flag of a container."""

    def probe(pool: InferencePool) -> str:
        found = [a.partition("=")[2] for a in container(pool, of)["args"] if a.startswith(f"--{name}=")]
        return found[0] if found else ""

    return probe


def at(of: str, path: str):
    """Return an object's value at a path; `None` if the object does not exist."""
    return lambda pool: dig(made_of(pool).get(of, {}), path)


def prefill(**fields: Any) -> dict[str, Any]:
    return {"roles": [{"name": "prefill", **fields}, {"name": "decode"}]}


def auto(**scaling: Any) -> dict[str, Any]:
    return prefill(scaling={"mode": "Auto", "minReplicas": 0, **scaling})


def decided(
    current: int, *, busy: bool = True, watched: float = 10_000.0, recommendations: tuple[tuple[float, int], ...] = ()
):
    """Return the replicas that the autoscaler writes for the role prefill, with ten requests and 45 of 100 blocks in
    use in each pod, or without data.
    """

    def probe(pool: InferencePool) -> int:
        now = 20_000.0
        worker = WorkerReport("p", "prefill", takes_work=True, load=WorkerLoad(blocks_total=100, blocks_free=100))
        if busy:
            worker = WorkerReport(
                "p", "prefill", takes_work=True, load=WorkerLoad(10, blocks_total=100, blocks_free=55)
            )
        report = FleetReport(now, (worker,) * current)
        role = pool.spec.role("prefill")
        assert role is not None
        history = Recommendations(recommendations, busy_at=now - 900, began_at=now - watched)
        return decide(role, current, current, report, history, now).replicas

    return probe


def bounded(replicas: int):
    def probe(pool: InferencePool) -> int:
        role = pool.spec.role("prefill")
        assert isinstance(role, RoleSpec)
        return role.bounded(replicas)

    return probe


def planned(pool: InferencePool) -> dict[tuple[str, str], int]:
    roles = [
        RoleState("prefill", 8, {"old": Count(8, 8), "new": Count(2, 2)}),
        RoleState("decode", 8, {"old": Count(8, 8), "new": Count(1, 1)}),
    ]
    return dict(next_step(roles, "new", pool.spec.rollout).desired)


def reported(pool: InferencePool) -> str:
    report = FleetReport(0.0, (WorkerReport("p", "prefill", takes_work=True, model_digest="ab" * 32),))
    seen = Observed(pool, "r", [RoleState("prefill", 1, {"r": Count(1, 1)})], "", 1, 1, report)
    return next(c["reason"] for c in status_of(seen, {}, "now")["conditions"] if c["type"] == "ModelAvailable")


def text(what: str):
    """Return a field of the spec that is read by the reconcile itself; tests with an API server show its effect."""
    return lambda pool: dig(msgspec.to_builtins(pool.spec), what)


RESOURCES = {"requests": {"memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1}, "claims": [{"name": "gpu"}]}
ADAPTER = {"name": "support", "source": "/models/s", "digest": "ab" * 8}


def listed(part: str):
    """Return a field of the only adapter in the adapter list of the pool's workers."""

    def probe(pool: InferencePool) -> str:
        text = made_of(pool)["ConfigMap/chat-adapters"]["data"]["adapters.toml"]
        return str(tomllib.loads(text).get("adapters", [{part: ""}])[0][part])

    return probe


EFFECTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    # path: (a spec that sets the field, a function that reads its effect, the effect expected)
    "model.name": ({"model": {"name": "other"}}, flag("served-name", GATEWAY), "other"),
    "model.source": ({"model": {"name": "m", "source": "/models/x"}}, flag("model"), "/models/x"),
    "model.digest": ({"model": {"name": "m", "digest": "cd" * 16}}, reported, "DigestMismatch"),
    "model.dtype": ({"model": {"name": "m", "dtype": "float32"}}, flag("dtype"), "float32"),
    "model.maxModelLen": ({"model": {"name": "m", "maxModelLen": 512}}, flag("max-model-len"), "512"),
    "model.windowPages": ({"model": {"name": "m", "windowPages": "release"}}, flag("window-pages"), "release"),
    "model.cache.mountPath": (
        {"model": {"name": "m", "cache": {"mountPath": "/big"}}},
        lambda pool: {m["name"]: m["mountPath"] for m in container(pool)["volumeMounts"]}.get("models"),
        "/big",
    ),
    "model.cache.readOnly": (
        {"model": {"name": "m", "cache": {"readOnly": False}}},
        lambda pool: {m["name"]: m.get("readOnly") for m in container(pool)["volumeMounts"]}.get("models"),
        False,
    ),
    "model.cache.persistentVolumeClaim": (
        {"model": {"name": "m", "cache": {"persistentVolumeClaim": "c"}}},
        lambda pool: {v["name"]: v for v in made_of(pool)[WORKER]["spec"]["template"]["spec"]["volumes"]}.get("models"),
        {"name": "models", "persistentVolumeClaim": {"claimName": "c"}},
    ),
    "model.cache.hostPath": (
        {"model": {"name": "m", "cache": {"hostPath": "/h"}}},
        lambda pool: {v["name"]: v for v in made_of(pool)[WORKER]["spec"]["template"]["spec"]["volumes"]}.get("models"),
        {"name": "models", "hostPath": {"path": "/h", "type": "Directory"}},
    ),
    "roles[].name": (
        {"roles": [{"name": "both"}]},
        lambda pool: [o for o in made_of(pool) if o.startswith("Deployment/") and "gateway" not in o],
        ["Deployment/chat-both-REV"],
    ),
    "roles[].replicas": (prefill(replicas=3), at("PoolRoleScaler/chat-prefill", "spec.replicas"), 3),
    "roles[].scaling.mode": (prefill(scaling={"mode": "External"}), bounded(99), 10),
    "roles[].scaling.minReplicas": (prefill(scaling={"mode": "External", "minReplicas": 4}), bounded(2), 4),
    "roles[].scaling.maxReplicas": (prefill(scaling={"mode": "External", "maxReplicas": 5}), bounded(9), 5),
    "roles[].scaling.targetKvUsage": (auto(targetKvUsage=0.15, targetRequests=1000), decided(2), 6),
    "roles[].scaling.targetRequests": (auto(targetRequests=5), decided(2), 4),
    "roles[].scaling.scaleUp.stabilizationWindowSeconds": (
        auto(targetRequests=5, scaleUp={"stabilizationWindowSeconds": 60}),
        decided(2, recommendations=((19_950.0, 2),)),
        2,
    ),
    "roles[].scaling.scaleDown.stabilizationWindowSeconds": (
        auto(scaleDown={"stabilizationWindowSeconds": 0}),
        decided(4, recommendations=((19_950.0, 4),)),
        3,
    ),
    "roles[].scaling.scaleToZero.idleSeconds": (auto(scaleToZero={"idleSeconds": 800}), decided(1, busy=False), 0),
    "roles[].engine.kvMemory": (prefill(engine={"kvMemory": "2Gi"}), flag("kv-memory"), "2GiB"),
    "roles[].engine.threads": (prefill(engine={"threads": 3}), flag("threads"), "3"),
    "roles[].parallelism.tensor": (prefill(parallelism={"tensor": 2}), flag("tensor-parallel"), "2"),
    "roles[].engine.tokenBudget": (prefill(engine={"tokenBudget": 64}), flag("token-budget"), "64"),
    "roles[].engine.maxNumSeqs": (prefill(engine={"maxNumSeqs": 7}), flag("max-num-seqs"), "7"),
    "roles[].engine.speculation": (prefill(engine={"speculation": "suffix?k=8"}), flag("speculation"), "suffix?k=8"),
    **{
        f"roles[].resources.{part}": (
            prefill(resources={part: value}),
            lambda pool: container(pool)["resources"],
            {part: value},
        )
        for part, value in RESOURCES.items()
    },
    "roles[].template": (
        prefill(template={"spec": {"runtimeClassName": "nvidia"}, "metadata": {"labels": {"a": "b"}}}),
        at(WORKER, "spec.template.spec.runtimeClassName"),
        "nvidia",
    ),
    "model.weights": ({"model": {"name": "m", "weights": "bfloat16"}}, flag("weights"), "bfloat16"),
    "model.toolCallParser": (
        {"model": {"name": "m", "toolCallParser": "hermes"}},
        lambda pool: [flag("tool-call-parser", where)(pool) for where in (WORKER, GATEWAY)],
        ["hermes", "hermes"],
    ),
    "model.reasoningParser": (
        {"model": {"name": "m", "reasoningParser": "think"}},
        lambda pool: [flag("reasoning-parser", where)(pool) for where in (WORKER, GATEWAY)],
        ["think", "think"],
    ),
    "engine.numerics": ({"engine": {"numerics": "fast"}}, flag("numerics"), "fast"),
    "engine.streamInterval": ({"engine": {"streamInterval": 4}}, flag("stream-interval"), "4"),
    "engine.loadPolicy": ({"engine": {"loadPolicy": "always"}}, flag("load-policy"), "always"),
    "engine.verifyKv": ({"engine": {"verifyKv": "digest"}}, flag("verify-kv"), "digest"),
    "engine.tierObjectTokens": ({"engine": {"tierObjectTokens": 128}}, flag("tier-object-tokens"), "128"),
    "roles[].engine.dtype": (
        {"model": {"name": "m", "dtype": "bfloat16"}, **prefill(engine={"dtype": "int8"})},
        lambda pool: [flag("dtype", f"Deployment/chat-{role}-REV")(pool) for role in ("prefill", "decode")],
        ["int8", "bfloat16"],
    ),
    "roles[].engine.maxChunkTokens": (prefill(engine={"maxChunkTokens": 64}), flag("max-chunk-tokens"), "64"),
    "roles[].engine.maxMixedTokens": (prefill(engine={"maxMixedTokens": 32}), flag("max-mixed-tokens"), "32"),
    "roles[].engine.backgroundSteps": (prefill(engine={"backgroundSteps": 1}), flag("background-steps"), "1"),
    "roles[].engine.adapterMemory": (prefill(engine={"adapterMemory": "2Gi"}), flag("adapter-memory"), "2GiB"),
    "connector.encryption": ({"connector": {"type": "tcp", "encryption": True}}, flag("kv-encryption"), "true"),
    "connector.offerSeconds": ({"connector": {"offerSeconds": 2}}, flag("offer-seconds"), "2"),
    "routing.cacheMapBlocks": ({"routing": {"cacheMapBlocks": 0}}, flag("cache-map-blocks", GATEWAY), "0"),
    "flowControl.maxQueued": ({"flowControl": {"maxQueued": 9}}, flag("max-queued", GATEWAY), "9"),
    "flowControl.maxQueuedBytes": (
        {"flowControl": {"maxQueuedBytes": "1Gi"}},
        flag("max-queued-bytes", GATEWAY),
        "1GiB",
    ),
    "flowControl.tenantOrder": (
        {"flowControl": {"tenantOrder": "arrival"}},
        flag("tenant-order", GATEWAY),
        "arrival",
    ),
    "gateway.processes": (
        {"gateway": {"processes": 3}},
        lambda pool: (
            flag("processes", GATEWAY)(pool),
            {port["name"]: port["containerPort"] for port in container(pool, GATEWAY)["ports"]},
            [end["port"] for end in made_of(pool)["PodMonitor/chat"]["spec"]["podMetricsEndpoints"]],
        ),
        (
            "3",
            {"http": 8000, "grpc": 9000, "admin": 8001, "admin-1": 8002, "admin-2": 8003},
            ["metrics", "admin", "admin-1", "admin-2"],
        ),
    ),
    "observability.logLevel": (
        {"observability": {"logLevel": "info"}},
        lambda pool: [flag("log-level", where)(pool) for where in (WORKER, GATEWAY)],
        ["info", "info"],
    ),
    "observability.logJson": (
        {"observability": {"logJson": True}},
        lambda pool: [flag("log-json", where)(pool) for where in (WORKER, GATEWAY)],
        ["true", "true"],
    ),
    "connector.type": ({"connector": {"type": "tcp"}}, flag("connector"), "tcp"),
    "tiers[].type": (
        {"tiers": [{"type": "disk", "size": "1Gi"}]},
        lambda pool: {e["name"]: e.get("value") for e in container(pool)["env"]}.get("KVFERRY_TIER"),
        "disk:///var/cache/tier/0?size=1GiB",
    ),
    "tiers[].size": (
        {"tiers": [{"type": "dram", "size": "8Gi"}]},
        lambda pool: {e["name"]: e.get("value") for e in container(pool)["env"]}.get("KVFERRY_TIER"),
        "dram://?size=8GiB",
    ),
    "tiers[].url": (
        {"tiers": [{"type": "redis", "url": "redis://r/0"}]},
        lambda pool: {e["name"]: e.get("value") for e in container(pool)["env"]}.get("KVFERRY_TIER"),
        "redis://r/0",
    ),
    "tiers[].urlSecret.name": (
        {"tiers": [{"type": "redis", "urlSecret": {"name": "s"}}]},
        lambda pool: [e for e in container(pool)["env"] if "TIER" in e["name"]],
        [
            {"name": "TIER_0_URL", "valueFrom": {"secretKeyRef": {"name": "s", "key": "url"}}},
            {"name": "KVFERRY_TIER", "value": "$(TIER_0_URL)"},
        ],
    ),
    "tiers[].urlSecret.key": (
        {"tiers": [{"type": "redis", "urlSecret": {"name": "s", "key": "k"}}]},
        lambda pool: [e["valueFrom"]["secretKeyRef"]["key"] for e in container(pool)["env"] if "TIER_0" in e["name"]],
        ["k"],
    ),
    "adapters[].name": ({"adapters": [ADAPTER]}, listed("name"), "support"),
    "adapters[].source": ({"adapters": [ADAPTER]}, listed("path"), "/models/s"),
    "adapters[].digest": ({"adapters": [ADAPTER]}, listed("digest"), "ab" * 8),
    "roles[].engine.device": (prefill(engine={"device": "cuda"}), flag("device"), "cuda"),
    "roles[].engine.gpuMemoryUtilization": (
        prefill(engine={"gpuMemoryUtilization": 0.45}),
        flag("gpu-memory-utilization"),
        "0.45",
    ),
    "roles[].engine.adapterSlots": (prefill(engine={"adapterSlots": 0}), flag("adapter-slots"), "0"),
    "roles[].engine.maxAdapterRank": (prefill(engine={"maxAdapterRank": 8}), flag("max-adapter-rank"), "8"),
    "roles[].engine.pinShare": (prefill(engine={"pinShare": 0.4}), flag("pin-share"), "0.4"),
    "roles[].engine.retentionShare": (prefill(engine={"retentionShare": 0.1}), flag("retention-share"), "0.1"),
    "routing.policy": ({"routing": {"policy": "random"}}, flag("policy", GATEWAY), "random"),
    "routing.prefixBlocks": ({"routing": {"prefixBlocks": 9}}, flag("prefix-blocks", GATEWAY), "9"),
    "model.blockTokens": ({"model": {"name": "m", "blockTokens": 32}}, flag("block-tokens"), "32"),
    "routing.skipPrefillBelowTokens": (
        {"routing": {"skipPrefillBelowTokens": 5}},
        flag("skip-prefill-below", GATEWAY),
        "5",
    ),
    "routing.kvPrefetchTokens": ({"routing": {"kvPrefetchTokens": 0}}, flag("kv-prefetch-tokens", GATEWAY), "0"),
    "flowControl.maxStreams": ({"flowControl": {"maxStreams": 2}}, flag("max-streams", GATEWAY), "2"),
    "flowControl.maxHeld": ({"flowControl": {"maxHeld": 3}}, flag("max-held", GATEWAY), "3"),
    "flowControl.holdSeconds": ({"flowControl": {"holdSeconds": 4}}, flag("hold-seconds", GATEWAY), "4"),
    "flowControl.requestTimeoutSeconds": (
        {"flowControl": {"requestTimeoutSeconds": 5}},
        flag("request-timeout", GATEWAY),
        "5",
    ),
    "rollout.maxSurge": ({"rollout": {"maxSurge": "5"}}, lambda pool: Bounds.of(pool.spec.rollout, 8), Bounds(5, 0)),
    "rollout.maxUnavailable": (
        {"rollout": {"maxUnavailable": "50%"}},
        lambda pool: Bounds.of(pool.spec.rollout, 8),
        Bounds(2, 4),
    ),
    "rollout.maxSkew": (
        {"rollout": {"maxSkew": 0.01, "maxSurge": "8"}},
        lambda pool: planned(pool)["prefill", "new"],
        2,  # at most 1 % further than decode; with the default, 3 pods
    ),
    "rollout.paused": (
        {"rollout": {"paused": True}},
        planned,
        {("prefill", "old"): 8, ("prefill", "new"): 2, ("decode", "old"): 8, ("decode", "new"): 1},
    ),
    "rollout.rollbackTo": ({"rollout": {"rollbackTo": "0" * 8}}, text("rollout.rollbackTo"), "0" * 8),
    "rollout.progressDeadlineSeconds": (
        {"rollout": {"progressDeadlineSeconds": 7}},
        at(WORKER, "spec.progressDeadlineSeconds"),
        7,
    ),
    "rollout.historyLimit": ({"rollout": {"historyLimit": 1}}, text("rollout.historyLimit"), 1),
    "drain.seconds": ({"drain": {"seconds": 90}}, at(WORKER, "spec.template.spec.terminationGracePeriodSeconds"), 105),
    "drain.lingerSeconds": (
        {"drain": {"lingerSeconds": 9}},
        at(GATEWAY, "spec.template.spec.terminationGracePeriodSeconds"),
        54,
    ),
    "engine.requestPolicy": (
        {"engine": {"requestPolicy": "two-level"}},
        lambda pool: [flag("scheduling", where)(pool) for where in (WORKER, GATEWAY)],
        ["two-level", "two-level"],
    ),
    **{
        f"engine.classWeights[].{part}": (
            {
                "engine": {
                    "requestPolicy": "weighted",
                    "classWeights": [{"priority": 0, "weight": 4}, {"priority": 2, "weight": 1}],
                }
            },
            lambda pool: [flag("class-weights", where)(pool) for where in (WORKER, GATEWAY)],
            ["0=4,2=1", "0=4,2=1"],
        )
        for part in ("priority", "weight")
    },
    "internalKeys.secretName": (
        {"internalKeys": {"secretName": "mine"}},
        lambda pool: [
            v["secret"]["secretName"]
            for v in made_of(pool)[WORKER]["spec"]["template"]["spec"]["volumes"]
            if v["name"] == "keys"
        ],
        ["mine"],
    ),
    "tenants.secretName": (
        {"tenants": {"secretName": "t"}},
        lambda pool: (
            flag("tenants", GATEWAY)(pool),
            [
                v["secret"]["secretName"]
                for v in made_of(pool)[GATEWAY]["spec"]["template"]["spec"]["volumes"]
                if v["name"] == "tenants"
            ],
        ),
        ("/etc/kvferry/tenants/tenants.toml", ["t"]),
    ),
    "gateway.replicas": ({"gateway": {"replicas": 3}}, at(GATEWAY, "spec.replicas"), 3),
    "gateway.apiKeysSecret": (
        {"gateway": {"apiKeysSecret": "k"}},
        flag("api-keys-file", GATEWAY),
        "/etc/kvferry/api-keys/keys",
    ),
    "gateway.tlsSecret": ({"gateway": {"tlsSecret": "t"}}, flag("tls-cert-file", GATEWAY), "/etc/kvferry/tls/tls.crt"),
    "gateway.state.url": (
        {"gateway": {"state": {"url": "redis://r/0"}}},
        lambda pool: {e["name"]: e.get("value") for e in container(pool, GATEWAY)["env"]}.get("KVFERRY_STATE"),
        "redis://r/0",
    ),
    "gateway.state.urlSecret.name": (
        {"gateway": {"state": {"urlSecret": {"name": "s"}}}},
        lambda pool: [e for e in container(pool, GATEWAY)["env"] if e["name"] == "KVFERRY_STATE"],
        [{"name": "KVFERRY_STATE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "url"}}}],
    ),
    "gateway.state.urlSecret.key": (
        {"gateway": {"state": {"urlSecret": {"name": "s", "key": "k"}}}},
        lambda pool: [
            e["valueFrom"]["secretKeyRef"]["key"]
            for e in container(pool, GATEWAY)["env"]
            if e["name"] == "KVFERRY_STATE"
        ],
        ["k"],
    ),
    "gateway.state.maxBytes": (
        {"gateway": {"state": {"url": "redis://r/0", "maxBytes": "1Gi"}}},
        flag("state-bytes", GATEWAY),
        "1GiB",
    ),
    "gateway.clientCaSecret": (
        {"gateway": {"clientCaSecret": "c", "tlsSecret": "t"}},
        lambda pool: (
            flag("tls-client-ca-file", GATEWAY)(pool),
            container(pool, GATEWAY)["readinessProbe"]["httpGet"]["port"],
        ),
        ("/etc/kvferry/client-ca/ca.crt", "admin"),
    ),
    "tls.mode": (
        {"tls": {"mode": "Managed"}},
        lambda pool: (
            [
                flag(name, pods)(pool)
                for pods in (WORKER, GATEWAY)
                for name in ("pool-tls-cert-file", "pool-tls-ca-file")
            ],
            flag("health")(pool),
            container(pool)["readinessProbe"]["grpc"],
            container(pool)["livenessProbe"]["grpc"],
            [projected(pool, pods) for pods in (WORKER, GATEWAY)],
        ),
        (
            ["/etc/kvferry/pool-tls/tls.crt", "/etc/kvferry/pool-tls/ca.crt"] * 2,
            "0.0.0.0:9103",
            {"port": 9103},
            {"port": 9103, "service": "liveness"},
            [
                {"chat-tls": [[f"{kind}.crt", "tls.crt"], [f"{kind}.key", "tls.key"], ["ca.crt", "ca.crt"]]}
                for kind in ("worker", "gateway")
            ],
        ),
    ),
    "tls.secretName": (
        {"tls": {"mode": "Secret", "secretName": "mine"}},
        lambda pool: [projected(pool, pods) for pods in (WORKER, GATEWAY)],
        [{"mine": [["tls.crt", "tls.crt"], ["tls.key", "tls.key"], ["ca.crt", "ca.crt"]]}] * 2,
    ),
    "gateway.service.type": (
        {"gateway": {"service": {"type": "NodePort"}}},
        at("Service/chat", "spec.type"),
        "NodePort",
    ),
    "gateway.service.httpPort": (
        {"gateway": {"service": {"httpPort": 81}}},
        at("Service/chat", "spec.ports.0.port"),
        81,
    ),
    "gateway.service.grpcPort": (
        {"gateway": {"service": {"grpcPort": 82}}},
        at("Service/chat", "spec.ports.1.port"),
        82,
    ),
    "gateway.service.annotations": (
        {"gateway": {"service": {"annotations": {"a": "b"}}}},
        at("Service/chat", "metadata.annotations"),
        {"a": "b"},
    ),
    **{
        f"gateway.resources.{part}": (
            {"gateway": {"resources": {part: value}}},
            lambda pool: container(pool, GATEWAY)["resources"],
            {part: value},
        )
        for part, value in RESOURCES.items()
    },
    "gateway.template": (
        {"gateway": {"template": {"spec": {"priorityClassName": "high"}}}},
        at(GATEWAY, "spec.template.spec.priorityClassName"),
        "high",
    ),
    "gateway.inferenceExtension": (
        {"gateway": {"inferenceExtension": "Auto"}},
        at("InferencePool/chat", "apiVersion"),
        "inference.networking.k8s.io/v1",
    ),
    "observability.podMonitor": ({"observability": {"podMonitor": "Off"}}, at("PodMonitor/chat", "kind"), None),
    "observability.podMonitorLabels": (
        {"observability": {"podMonitorLabels": {"release": "p"}}},
        at("PodMonitor/chat", "metadata.labels.release"),
        "p",
    ),
    "observability.otlp": (
        {"observability": {"otlp": "http://c:4318"}},
        lambda pool: [flag("otlp")(pool), flag("otlp", GATEWAY)(pool)],
        ["http://c:4318"] * 2,
    ),
    "observability.traceSample": (
        {"observability": {"otlp": "http://c:4318", "traceSample": 0.25}},
        lambda pool: [flag("trace-sample")(pool), flag("trace-sample", GATEWAY)(pool)],
        ["0.25"] * 2,
    ),
    "networkPolicy": (
        {"networkPolicy": "Off"},
        lambda pool: [at(f"NetworkPolicy/chat-{of}", "kind")(pool) for of in ("workers", "gateways")],
        [None, None],
    ),
    "disruption.maxUnavailable": (
        {"disruption": {"maxUnavailable": "30%"}},
        at("PodDisruptionBudget/chat-decode", "spec.maxUnavailable"),
        "30%",
    ),
    "image": ({"image": "mine:1"}, lambda pool: container(pool, GATEWAY)["image"], "mine:1"),
    "imagePullPolicy": ({"imagePullPolicy": "Always"}, lambda pool: container(pool)["imagePullPolicy"], "Always"),
    "imagePullSecrets": (
        {"imagePullSecrets": ["r"]},
        at(WORKER, "spec.template.spec.imagePullSecrets"),
        [{"name": "r"}],
    ),
}

OTHERWISE = {
    "observability.traceSample": {"observability": {"otlp": "http://c:4318"}},
    "roles[].scaling.scaleUp.stabilizationWindowSeconds": auto(targetRequests=5),
}
"""Specs without the field, for fields whose absence has no effect in a pool of defaults."""

CHANGES_WORKERS = {
    "model.name", "model.source", "model.digest", "model.dtype", "model.maxModelLen", "model.windowPages",
    "model.blockTokens", "model.weights", "model.toolCallParser", "model.reasoningParser",
    "connector.type", "connector.offerSeconds", "connector.encryption", "drain.seconds", "internalKeys.secretName",
    "image",
    "observability.otlp", "observability.traceSample", "observability.logLevel", "observability.logJson",
    "imagePullPolicy", "imagePullSecrets", "tls.mode", "tls.secretName", "roles[].name",
    "roles[].template",
}  # fmt: skip
CHANGES_WORKERS_UNDER = ("model.cache.", "engine.", "roles[].engine.", "roles[].resources.", "tiers[].")


def test_the_table_has_every_field_and_no_other():
    assert set(EFFECTS) == {path for path, _ in leaves(SPEC)}


@pytest.mark.parametrize("path", EFFECTS)
def test_each_field_has_its_effect(path):
    spec, probe, seen = EFFECTS[path]
    assert probe(pool(**spec)) == seen
    assert probe(pool(**OTHERWISE.get(path, {}))) != seen


@pytest.mark.parametrize("path", EFFECTS)
def test_only_fields_of_worker_pods_make_a_new_revision(path):
    spec, *_ = EFFECTS[path]
    changed = made_of(pool(**spec))["revision"] != made_of(pool())["revision"]
    assert changed == (path in CHANGES_WORKERS or path.startswith(CHANGES_WORKERS_UNDER))


@pytest.mark.parametrize("spec", [{}, *(spec for spec, *_ in EFFECTS.values())], ids=["nothing", *EFFECTS])
def test_a_file_reads_as_the_api_server_stores_it(spec):
    """The defaults in the code equal those of the definition."""
    plain = body(**spec)
    assert parse_pool(plain) == parse_pool({**plain, "spec": with_defaults(plain["spec"], SPEC)})


@pytest.mark.parametrize("definition", [POOL, SCALER], ids=["pool", "scaler"])
def test_every_field_is_described(definition):
    def bare(node: dict[str, Any], path: str) -> list[str]:
        found = [] if node.get("description") or not path else [path]
        for name, part in node.get("properties", {}).items():
            found += bare(part, f"{path}.{name}")
        if node.get("type") == "array":
            found += [p for p in bare(node["items"], f"{path}[]") if p != f"{path}[]"]
        return found

    assert schema(definition)["description"]
    assert bare(schema(definition), "") == [".apiVersion", ".kind", ".metadata"]  # described by Kubernetes
