"""Pools that the API server refuses or accepts. `kvferry operator plan` has the same verdicts: a test without a cluster
and one with a real API server use these tables."""

from typing import Any


def pool(**spec: Any) -> dict[str, Any]:
    plain = {"model": {"name": "m"}, "roles": [{"name": "prefill"}, {"name": "decode"}]}
    return {
        "apiVersion": "kvferry.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "chat"},
        "spec": {**plain, **spec},
    }


def prefill(**fields: Any) -> dict[str, Any]:
    return {"roles": [{"name": "prefill", **fields}, {"name": "decode"}]}


def tiers(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"tiers": list(entries)}


SUPPORT = {"name": "support", "source": "/models/support"}


def adapters(**fields: Any) -> dict[str, Any]:
    return {"adapters": [{**SUPPORT, **fields}]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "spec.model"),
    "no model name": ({"model": {}}, "spec.model.name: Required value"),
    "empty model name": ({"model": {"name": ""}}, "spec.model.name"),
    "relative source": ({"model": {"name": "m", "source": "models/x"}}, "absolute path inside the pods"),
    "tls without a Secret": ({"tls": {"mode": "Secret"}}, "tls.secretName is required"),
    "a Secret that tls does not use": (
        {"tls": {"mode": "Managed", "secretName": "s"}},
        "not allowed with other modes",
    ),
    "unknown tls mode": ({"tls": {"mode": "On"}}, 'supported values: "Off"'),
    "certificates of clients without TLS": ({"gateway": {"clientCaSecret": "c"}}, "requires gateway.tlsSecret"),
    "digest no hex": ({"model": {"name": "m", "digest": "sha256:xyz"}}, "spec.model.digest"),
    "unknown dtype": ({"model": {"name": "m", "dtype": "int3"}}, 'supported values: "auto"'),
    "negative tokens": ({"model": {"name": "m", "maxModelLen": -1}}, "greater than or equal to 0"),
    "two caches": (
        {"model": {"name": "m", "cache": {"hostPath": "/x", "persistentVolumeClaim": "y"}}},
        "model.cache.hostPath are mutually exclusive",
    ),
    "relative mount": ({"model": {"name": "m", "cache": {"mountPath": "x"}}}, "spec.model.cache.mountPath"),
    "no roles": ({"roles": []}, "spec.roles"),
    "unknown role": ({"roles": [{"name": "encode"}]}, 'supported values: "prefill"'),
    "prefill alone": ({"roles": [{"name": "prefill"}]}, "needs the roles prefill and decode, or the role both"),
    "decode alone": ({"roles": [{"name": "decode"}]}, "needs the roles prefill and decode, or the role both"),
    "a role twice": ({"roles": [{"name": "both"}, {"name": "both"}]}, "Duplicate value"),
    "negative replicas": (prefill(replicas=-1), "greater than or equal to 0"),
    "too many replicas": (prefill(replicas=1001), "less than or equal to 1000"),
    "replicas and Auto": (
        prefill(replicas=2, scaling={"mode": "Auto"}),
        "only one writer may own the number of replicas",
    ),
    "replicas and External": (
        prefill(replicas=2, scaling={"mode": "External"}),
        "only one writer may own the number of replicas",
    ),
    "unknown scaling": (prefill(scaling={"mode": "Magic"}), 'supported values: "Static"'),
    "min above max": (
        prefill(scaling={"mode": "Auto", "minReplicas": 5, "maxReplicas": 2}),
        "minReplicas must not exceed scaling.maxReplicas",
    ),
    "max 0": (prefill(scaling={"mode": "Auto", "maxReplicas": 0}), "greater than or equal to 1"),
    "kv target of 1": (prefill(scaling={"mode": "Auto", "targetKvUsage": 1}), "less than 1"),
    "kv target of 0": (prefill(scaling={"mode": "Auto", "targetKvUsage": 0}), "greater than 0"),
    "offers of no time": ({"connector": {"offerSeconds": 0}}, "spec.connector.offerSeconds"),
    "kv target in percent": (prefill(scaling={"mode": "Auto", "targetKvUsage": 70}), "targetKvUsage"),
    "target without Auto": (prefill(scaling={"mode": "External", "targetRequests": 3}), "require scaling.mode Auto"),
    "endless window": (
        prefill(scaling={"mode": "Auto", "scaleDown": {"stabilizationWindowSeconds": 86401}}),
        "scaleDown",
    ),
    "idle at once": (prefill(scaling={"mode": "Auto", "scaleToZero": {"idleSeconds": 0}}), "scaleToZero"),
    "unknown request policy": (
        {"engine": {"requestPolicy": "lifo"}},
        'supported values: "fcfs", "priority", "srtf", "two-level", "weighted"',
    ),
    "weights without weighted": (
        {"engine": {"classWeights": [{"priority": 0, "weight": 2}]}},
        "engine.classWeights requires engine.requestPolicy weighted",
    ),
    "a weight of 0": (
        {"engine": {"requestPolicy": "weighted", "classWeights": [{"priority": 0, "weight": 0}]}},
        "classWeights[0].weight",
    ),
    "unknown window pages": ({"model": {"name": "m", "windowPages": "drop"}}, 'supported values: "keep", "release"'),
    "heads without a folder": (prefill(engine={"speculation": "medusa?k=3"}), "spec.roles[0].engine.speculation"),
    "unknown speculation": (prefill(engine={"speculation": "lookahead=/heads"}), "spec.roles[0].engine.speculation"),
    "a draft of no model": (prefill(engine={"speculation": "draft=?k=3"}), "spec.roles[0].engine.speculation"),
    "a size without unit": (prefill(engine={"kvMemory": "much"}), "spec.roles[0].engine.kvMemory"),
    "kvMemory in milli": (prefill(engine={"kvMemory": "512m"}), "a size with a unit, for example 512Mi or 4Gi"),
    "kvMemory without unit": (prefill(engine={"kvMemory": "512"}), "a size with a unit, for example 512Mi or 4Gi"),
    "no kvMemory": (prefill(engine={"kvMemory": "0Gi"}), "a size with a unit, for example 512Mi or 4Gi"),
    "cuda without a GPU": (prefill(engine={"device": "cuda"}), "engine.device cuda needs a GPU in resources.limits"),
    "unknown device": (prefill(engine={"device": "tpu"}), 'supported values: "auto", "cpu", "cuda"'),
    "an adapter called as the model": (adapters(name="m"), "an adapter cannot have the name of the model"),
    "a relative folder of an adapter": (adapters(source="support"), "must be an absolute path inside the pods"),
    "a short digest of an adapter": (adapters(digest="abc"), "spec.adapters[0].digest"),
    "an adapter twice": ({"adapters": [SUPPORT, SUPPORT]}, "Duplicate value"),
    "a tier without unit": (tiers({"type": "dram", "size": "8"}), "a size with a unit, for example 512Mi or 8Gi"),
    "cpu: 2x": (prefill(resources={"limits": {"cpu": "2x"}}), "must be a quantity, for example 500m or 2 CPUs"),
    "requests of 2x": (prefill(resources={"requests": {"cpu": "2x"}}), "must be a quantity"),
    "limits of the gateway": ({"gateway": {"resources": {"limits": {"cpu": "2x"}}}}, "must be a quantity"),
    "requests of the gateway": ({"gateway": {"resources": {"requests": {"cpu": -1}}}}, "must be a quantity"),
    "negative memory": (prefill(resources={"requests": {"memory": "-1Gi"}}), "must be a quantity"),
    "memroy": (prefill(resources={"limits": {"memroy": "1Gi"}}), "unknown resource; use cpu, memory"),
    "requests of memroy": (prefill(resources={"requests": {"memroy": "1Gi"}}), "unknown resource; use cpu, memory"),
    "limits of memroy": ({"gateway": {"resources": {"limits": {"memroy": 1}}}}, "unknown resource; use cpu, memory"),
    "limit": (prefill(resources={"limit": {"cpu": 1}}), 'unknown field "spec.roles[0].resources.limit"'),
    "cpus of the gateway": ({"gateway": {"resources": {"requests": {"cpus": 1}}}}, "unknown resource; use cpu, memory"),
    "an image with a space": ({"image": "kvferry 1"}, "must be an image reference"),
    "an image of upper case": ({"image": "host/Kvferry:1"}, "must be an image reference"),
    "a model name with a space": ({"model": {"name": "my model"}}, "must be a name of letters, digits"),
    "no name of a Secret": ({"internalKeys": {"secretName": "My_Keys"}}, "spec.internalKeys.secretName"),
    "negative threads": (prefill(engine={"threads": -2}), "spec.roles[0].engine.threads"),
    "no processes": (prefill(parallelism={"tensor": 0}), "spec.roles[0].parallelism.tensor"),
    "processes of a GPU": (
        prefill(parallelism={"tensor": 2}, engine={"device": "cuda"}, resources={"limits": {"nvidia.com/gpu": 1}}),
        "parallelism.tensor above 1 is for CPUs",
    ),
    "no token budget": (prefill(engine={"tokenBudget": 0}), "spec.roles[0].engine.tokenBudget"),
    "no sequences": (prefill(engine={"maxNumSeqs": 0}), "spec.roles[0].engine.maxNumSeqs"),
    "restart policy": (prefill(template={"spec": {"restartPolicy": "Never"}}), "worker pods use Always"),
    "our own label": (
        prefill(template={"metadata": {"labels": {"kvferry.dev/pool": "x"}}}),
        "labels under kvferry.dev/ are reserved for the operator",
    ),
    "unknown connector": ({"connector": {"type": "udp"}}, 'supported values: "nixl"'),
    "encryption over nixl": ({"connector": {"encryption": True}}, "connector nixl does not encrypt KV"),
    "shm between pods": ({"connector": {"type": "shm"}}, "between pods use nixl or tcp"),
    "unknown tier": (tiers({"type": "tape", "size": "1Gi"}), 'supported values: "dram"'),
    "dram without size": (tiers({"type": "dram"}), "require size"),
    "dram with url": (tiers({"type": "dram", "size": "1Gi", "url": "redis://x"}), "other types accept neither"),
    "redis without url": (tiers({"type": "redis"}), "requires url or urlSecret"),
    "redis with size": (tiers({"type": "redis", "url": "redis://x", "size": "1Gi"}), "maxmemory"),
    "redis of another scheme": (tiers({"type": "redis", "url": "http://x"}), "start with redis://"),
    "a password in the url": (tiers({"type": "redis", "url": "redis://:pw@x/0"}), "store the complete URL in a Secret"),
    "url twice": (
        tiers({"type": "redis", "url": "redis://x", "urlSecret": {"name": "s"}}),
        "url and urlSecret are mutually exclusive",
    ),
    "five tiers": (tiers(*({"type": "dram", "size": "1Gi"} for _ in range(5))), "must have at most 4 items"),
    "state of another scheme": ({"gateway": {"state": {"url": "http://x"}}}, "start with redis://"),
    "a password in the url of state": (
        {"gateway": {"state": {"url": "redis://:pw@x/0"}}},
        "store the complete URL in a Secret",
    ),
    "url of state twice": (
        {"gateway": {"state": {"url": "redis://x", "urlSecret": {"name": "s"}}}},
        "url and urlSecret are mutually exclusive",
    ),
    "records without a unit": ({"gateway": {"state": {"maxBytes": "256"}}}, "must be a size with a unit"),
    "no prefix": ({"routing": {"prefixBlocks": 0}}, "spec.routing.prefixBlocks"),
    "no block": ({"model": {"name": "m", "blockTokens": 0}}, "spec.model.blockTokens"),
    "negative skip": ({"routing": {"skipPrefillBelowTokens": -1}}, "spec.routing.skipPrefillBelowTokens"),
    "negative KV prefetch": ({"routing": {"kvPrefetchTokens": -1}}, "spec.routing.kvPrefetchTokens"),
    "no streams": ({"flowControl": {"maxStreams": 0}}, "spec.flowControl.maxStreams"),
    "held for days": ({"flowControl": {"holdSeconds": 3601}}, "spec.flowControl.holdSeconds"),
    "negative held": ({"flowControl": {"maxHeld": -1}}, "spec.flowControl.maxHeld"),
    "no time": ({"flowControl": {"requestTimeoutSeconds": 0}}, "spec.flowControl.requestTimeoutSeconds"),
    "surge no number": ({"rollout": {"maxSurge": "some"}}, "spec.rollout.maxSurge"),
    "nothing may move": ({"rollout": {"maxSurge": "0", "maxUnavailable": "0%"}}, "cannot both be 0"),
    "skew 0": ({"rollout": {"maxSkew": 0}}, "spec.rollout.maxSkew"),
    "no such name of a revision": ({"rollout": {"rollbackTo": "chat-1"}}, "spec.rollout.rollbackTo"),
    "no deadline": ({"rollout": {"progressDeadlineSeconds": 0}}, "spec.rollout.progressDeadlineSeconds"),
    "long history": ({"rollout": {"historyLimit": 51}}, "spec.rollout.historyLimit"),
    "endless drain": ({"drain": {"seconds": 3601}}, "spec.drain.seconds"),
    "endless linger": ({"drain": {"lingerSeconds": 601}}, "spec.drain.lingerSeconds"),
    "many gateways": ({"gateway": {"replicas": 101}}, "spec.gateway.replicas"),
    "unknown service": ({"gateway": {"service": {"type": "ExternalName"}}}, 'supported values: "ClusterIP"'),
    "no port": ({"gateway": {"service": {"httpPort": 0}}}, "spec.gateway.service.httpPort"),
    "one port for both": ({"gateway": {"service": {"httpPort": 9000}}}, "httpPort and grpcPort must differ"),
    "labels that are no map": ({"gateway": {"template": {"metadata": {"labels": "abc"}}}}, "must be of type object"),
    "no metadata": ({"gateway": {"template": {"metadata": "x"}}}, "must be of type object"),
    "a pod that is text": ({"gateway": {"template": {"spec": "x"}}}, "must be of type object"),
    "our own label on gateways": (
        {"gateway": {"template": {"metadata": {"labels": {"kvferry.dev/role": "x"}}}}},
        "labels under kvferry.dev/ are reserved for the operator",
    ),
    "restart policy of gateways": (
        {"gateway": {"template": {"spec": {"restartPolicy": "Never"}}}},
        "gateway pods use Always",
    ),
    "min above the default max": (
        prefill(scaling={"mode": "Auto", "minReplicas": 20}),
        "(default 10)",
    ),
    "unknown extension": ({"gateway": {"inferenceExtension": "Maybe"}}, "spec.gateway.inferenceExtension"),
    "unknown monitor": ({"observability": {"podMonitor": "Maybe"}}, "spec.observability.podMonitor"),
    "unknown policy": ({"networkPolicy": "Open"}, "spec.networkPolicy"),
    "budget no number": ({"disruption": {"maxUnavailable": "few"}}, "spec.disruption.maxUnavailable"),
    "unknown pull policy": ({"imagePullPolicy": "Sometimes"}, "spec.imagePullPolicy"),
    "nine pull secrets": ({"imagePullSecrets": [str(i) for i in range(9)]}, "spec.imagePullSecrets"),
    "a GPU's memory in percent": (prefill(engine={"gpuMemoryUtilization": 90}), "less than or equal to 1"),
    "no GPU memory": (prefill(engine={"gpuMemoryUtilization": 0}), "greater than 0"),
    "pins in percent": (prefill(engine={"pinShare": 25}), "less than or equal to 1"),
    "retentions below zero": (prefill(engine={"retentionShare": -0.1}), "greater than or equal to 0"),
    "traces in percent": ({"observability": {"traceSample": 5}}, "less than or equal to 1"),
    "skew in percent": ({"rollout": {"maxSkew": 25}}, "less than or equal to 1"),
    "off as a boolean": ({"model": {"name": "m", "reasoningParser": False}}, "spec.model.reasoningParser"),
    "adapter memory without unit": (prefill(engine={"adapterMemory": "1"}), "a size with a unit"),
    "a queue without unit": ({"flowControl": {"maxQueuedBytes": "1"}}, "a size with a unit"),
    "65 processes": ({"gateway": {"processes": 65}}, "spec.gateway.processes"),
    "a word for replicas": (prefill(replicas="two"), "spec.roles[0].replicas"),
    "half a replica": (prefill(replicas=1.5), "spec.roles[0].replicas"),
    "a field of another place": (
        prefill(engine={"windowPages": "keep"}),
        'unknown field "spec.roles[0].engine.windowPages"',
    ),
    "a line break in a pattern": (adapters(digest="ab" * 32 + "\n"), "spec.adapters[0].digest"),
    "a priority of 33 bits": (
        {"engine": {"requestPolicy": "weighted", "classWeights": [{"priority": 1 << 32, "weight": 1}]}},
        "spec.engine.classWeights[0].priority",
    ),
    "an unknown field": ({"rolls": []}, 'unknown field "spec.rolls"'),
}


GOOD: dict[str, dict[str, Any]] = {
    "resources": prefill(
        resources={
            "requests": {"cpu": "500m", "memory": "1.5Gi", "hugepages-2Mi": "64Mi"},
            "limits": {"cpu": 2, "memory": 1073741824, "nvidia.com/gpu": 1, "rdma/hca": "1"},
            "claims": [{"name": "gpu"}],
        }
    ),
    "no amount": prefill(resources={"limits": {"cpu": None, "memory": 1.0}}),
    "sizes": {**prefill(engine={"kvMemory": "0.5Gi"}), **tiers({"type": "disk", "size": "1Ti"})},
    "a GPU": prefill(engine={"device": "cuda", "kvMemory": "auto"}, resources={"limits": {"nvidia.com/gpu": 1}}),
    "a GPU by a claim": prefill(engine={"device": "cuda"}, resources={"claims": [{"name": "gpu"}]}),
    "managed tls": {"tls": {"mode": "Managed"}},
    "tls of a Secret": {"tls": {"mode": "Secret", "secretName": "s"}},
    "certificates of clients": {"gateway": {"clientCaSecret": "c", "tlsSecret": "t"}},
    "an adapter": adapters(digest="ab" * 32),
    "a request policy": {"engine": {"requestPolicy": "two-level"}},
    "weights of classes": {"engine": {"requestPolicy": "weighted", "classWeights": [{"priority": -1, "weight": 1000}]}},
    "speculation": prefill(engine={"speculation": "ngram?k=4&min=3"}),
    "a draft model": prefill(engine={"speculation": "draft=/models/small?k=4&fixed=1"}),
    "an EAGLE head": prefill(engine={"speculation": "eagle=/heads/eagle3?k=4"}),
    "Medusa heads": prefill(engine={"speculation": "medusa=/heads/medusa"}),
    "the earlier notation": prefill(engine={"kvMemory": "512MiB"}),
    "an image with everything": {"image": f"registry.example:5000/team/kvferry:0.1.0@sha256:{'0' * 64}"},
    "a short image": {"image": "kvferry"},
    "a local image": {"image": "localhost/kvferry-host:1"},
    "shares": {
        **prefill(engine={"gpuMemoryUtilization": 1, "pinShare": 0, "retentionShare": 0}),
        "observability": {"traceSample": 0},
        "rollout": {"maxSkew": 1},
    },
    "a type of a role": prefill(engine={"dtype": "int8"}),
    "a model name of a hub": {"model": {"name": "org/Model-1.5_8B:instruct"}},
}


NAMES: dict[str, str] = {
    "c" * 41: "40 characters",
    "c" * 63: "40 characters",
    "1chat": "start with a letter",
    "a.b": "start with a letter",
    "Chat": "metadata.name",
}
"""Refused names of pools."""


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another model": ({}, {"model": {"name": "other"}}, "create another pool"),
    "tls switched on": ({}, {"tls": {"mode": "Managed"}}, "mode is immutable"),
    "tls switched off": ({"tls": {"mode": "Managed"}}, {}, "mode is immutable"),
}
"""Refused changes: the spec before, the spec after, and a part of the message."""


ALLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another type": ({}, {"model": {"name": "m", "dtype": "float32"}}),
    "another role": ({}, {"roles": [{"name": "both"}]}),
    "the default of tls": ({"tls": {"mode": "Off"}}, {}),
}
"""Accepted changes: the spec before and after."""
