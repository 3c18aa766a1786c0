"""Every flag of workers and gateways is a field of the definition, or has a reason for not being one."""

import re
from typing import Any

import pytest
from unit.operator.definitions import leaves, schema
from unit.operator.pools import made_of, pool

from kvferry.cli.options import bound
from kvferry.core.settings.parsers import boolean, size_bytes, size_or_auto
from kvferry.core.settings.processes import GATEWAY, LOGGING, WORKER
from kvferry.core.settings.setting import Setting

SETTINGS: dict[str, Setting] = {setting.name: bound(setting) for setting in (*WORKER, *GATEWAY, *LOGGING)}
FIELDS = dict(leaves(schema()["properties"]["spec"]))

FIELD_OF = {
    "role": "roles[].name",
    "model": "model.source",
    "served_name": "model.name",
    "tool_call_parser": "model.toolCallParser",
    "reasoning_parser": "model.reasoningParser",
    "connector": "connector.type",
    "device": "roles[].engine.device",
    "dtype": "model.dtype",
    "weights": "model.weights",
    "numerics": "engine.numerics",
    "threads": "roles[].engine.threads",
    "tensor_parallel": "roles[].parallelism.tensor",
    "kv_memory": "roles[].engine.kvMemory",
    "gpu_memory_utilization": "roles[].engine.gpuMemoryUtilization",
    "pin_share": "roles[].engine.pinShare",
    "retention_share": "roles[].engine.retentionShare",
    "block_tokens": "model.blockTokens",
    "window_pages": "model.windowPages",
    "max_model_len": "model.maxModelLen",
    "token_budget": "roles[].engine.tokenBudget",
    "max_chunk_tokens": "roles[].engine.maxChunkTokens",
    "max_mixed_tokens": "roles[].engine.maxMixedTokens",
    "background_steps": "roles[].engine.backgroundSteps",
    "max_num_seqs": "roles[].engine.maxNumSeqs",
    "scheduling": "engine.requestPolicy",
    "class_weights": "engine.classWeights[].weight",
    "stream_interval": "engine.streamInterval",
    "speculation": "roles[].engine.speculation",
    "adapters_file": "adapters[].source",
    "adapter_slots": "roles[].engine.adapterSlots",
    "max_adapter_rank": "roles[].engine.maxAdapterRank",
    "adapter_memory": "roles[].engine.adapterMemory",
    "tier": "tiers[].type",
    "tier_object_tokens": "engine.tierObjectTokens",
    "load_policy": "engine.loadPolicy",
    "verify_kv": "engine.verifyKv",
    "kv_encryption": "connector.encryption",
    "offer_seconds": "connector.offerSeconds",
    "otlp": "observability.otlp",
    "trace_sample": "observability.traceSample",
    "drain_seconds": "drain.seconds",
    "max_held": "flowControl.maxHeld",
    "hold_seconds": "flowControl.holdSeconds",
    "api_keys_file": "gateway.apiKeysSecret",
    "tenants": "tenants.secretName",
    "tls_cert_file": "gateway.tlsSecret",
    "tls_key_file": "gateway.tlsSecret",
    "tls_client_ca_file": "gateway.clientCaSecret",
    "pool_tls_cert_file": "tls.secretName",
    "pool_tls_key_file": "tls.secretName",
    "pool_tls_ca_file": "tls.secretName",
    "ticket_key_file": "internalKeys.secretName",
    "tenant_key_file": "internalKeys.secretName",
    "gateway_key_file": "internalKeys.secretName",
    "admin_token_file": "internalKeys.secretName",
    "policy": "routing.policy",
    "prefix_blocks": "routing.prefixBlocks",
    "skip_prefill_below": "routing.skipPrefillBelowTokens",
    "cache_map_blocks": "routing.cacheMapBlocks",
    "kv_prefetch_tokens": "routing.kvPrefetchTokens",
    "max_streams": "flowControl.maxStreams",
    "max_queued": "flowControl.maxQueued",
    "max_queued_bytes": "flowControl.maxQueuedBytes",
    "tenant_order": "flowControl.tenantOrder",
    "request_timeout": "flowControl.requestTimeoutSeconds",
    "processes": "gateway.processes",
    "state": "gateway.state.url",
    "state_bytes": "gateway.state.maxBytes",
    "linger_seconds": "drain.lingerSeconds",
    "log_level": "observability.logLevel",
    "log_json": "observability.logJson",
}
"""Field of each flag."""

ALSO_OF = {"roles[].engine.dtype": "dtype"}
"""Further fields of a flag."""

NO_FIELD = {
    "listen": "set by the operator: its ports are those of Services and probes",
    "admin": "set by the operator: its ports are those of Services and probes",
    "metrics": "set by the operator: its port is that of the PodMonitor",
    "health": "set by the operator: its port is that of the probes",
    "http": "set by the operator; the Service's ports are gateway.service.httpPort and grpcPort",
    "grpc": "set by the operator; the Service's ports are gateway.service.httpPort and grpcPort",
    "advertise_host": "set by the operator: the pod's address",
    "worker_id": "set by the operator: the pod's name",
    "pool": "set by the operator: the pool",
    "prefill": "set by the operator: gateways find the pods of --pool",
    "decode": "set by the operator: gateways find the pods of --pool",
    "both": "set by the operator: gateways find the pods of --pool",
    "lease_seconds": "set by the operator: pods terminate no earlier than their leases end",
    "ticket_key": "a secret value; the operator mounts internalKeys as files",
    "tenant_key": "a secret value; the operator mounts internalKeys as files",
    "gateway_key": "a secret value; the operator mounts internalKeys as files",
    "decode_listen": "role split has no pods: roles prefill and decode are scaled separately",
    "decode_admin": "role split has no pods: roles prefill and decode are scaled separately",
    "adapter": "spec.adapters is a file, which pods follow without a restart",
    "adapter_folder": "spec.adapters lists all adapters; calls to one of several gateways would change single pods",
    "weights_folder": "a folder in a pod. As KVFERRY_WEIGHTS_FOLDER, with a volume, in roles[].template",
    "weight_version": "of one checkpoint. As KVFERRY_WEIGHT_VERSION in roles[].template",
    "probe_key": "of local stacks",
    "share_ports": "set by --processes",
    "strict_fields": "of a gateway's clients. As KVFERRY_STRICT_FIELDS in gateway.template",
    "sse_keepalive": "of a gateway's clients. As KVFERRY_SSE_KEEPALIVE in gateway.template",
    "http_keepalive": "of a gateway's clients. As KVFERRY_HTTP_KEEPALIVE in gateway.template",
    "cors_origins": "of a gateway's clients. As KVFERRY_CORS_ORIGINS in gateway.template",
    "allowed_hosts": "of a gateway's clients. As KVFERRY_ALLOWED_HOSTS in gateway.template",
    "no_page": "of a gateway's clients. As KVFERRY_NO_PAGE in gateway.template",
    "kernels": "for comparisons; auto measures. As KVFERRY_KERNELS in roles[].template",
    "async_steps": "for comparisons. As KVFERRY_ASYNC_STEPS in roles[].template",
    "batch_folder": "a folder in a pod, or state. As KVFERRY_BATCH_FOLDER (a folder with a volume) in gateway.template",
    "state_file_bytes": "of files in that server. As KVFERRY_STATE_FILE_BYTES in gateway.template",
    "max_file_bytes": "of the batch folder. As KVFERRY_MAX_FILE_BYTES in gateway.template",
    "tenant_file_bytes": "of the batch folder. As KVFERRY_TENANT_FILE_BYTES in gateway.template",
    "tenant_files": "of the batch folder. As KVFERRY_TENANT_FILES in gateway.template",
    "batch_lines": "of the batch folder. As KVFERRY_BATCH_LINES in gateway.template",
    "trace_file": "a file in a pod, for recordings. As KVFERRY_TRACE_FILE, with a volume, in gateway.template",
    "trace_file_bytes": "a file in a pod, for recordings. As KVFERRY_TRACE_FILE_BYTES in gateway.template",
}
"""Why the other flags have no field."""

OTHER_DEFAULT = {
    "connector": "shm does not reach other pods",
    "window_pages": "auto depends on the process; workers of a pool must agree",
    "linger_seconds": "nodes take seconds to remove an endpoint",
    "trace_sample": "a pool serves many requests, and traces cost memory of the collector",
    "model": "a pool names its model",
    "role": "roles are listed",
}
OTHER_CHOICES = {
    "role": "role split has no pods",
    "connector": "memory reaches no other process",
    "window_pages": "workers of a pool must agree, so that auto is not accepted",
    "device": "a container sees its own GPUs only, so that cuda:N is not needed",
    "tier": "schemes of the URLs",
}
OTHER_MINIMUM = {"offer_seconds": "whole seconds"}
SIZES = (size_bytes, size_or_auto)


def with_fields() -> list[tuple[str, str]]:
    return [*FIELD_OF.items(), *((flag, path) for path, flag in ALSO_OF.items())]


def is_accepted(setting: Setting, value: object) -> bool:
    try:
        setting.parse(str(value))
    except ValueError:
        return False
    return True


def test_every_flag_has_a_field_or_a_reason():
    assert SETTINGS.keys() == FIELD_OF.keys() | NO_FIELD.keys()
    assert not FIELD_OF.keys() & NO_FIELD.keys()
    assert {*FIELD_OF.values(), *ALSO_OF} <= FIELDS.keys()


@pytest.mark.parametrize(("flag", "path"), with_fields())
def test_a_field_has_the_default_of_its_flag(flag, path):
    setting, field = SETTINGS[flag], FIELDS[path]
    if "default" not in field or flag in OTHER_DEFAULT:
        return
    default = field["default"]
    if setting.parse in SIZES:
        default = setting.parse(re.sub(r"i$", "iB", default))
    assert default == setting.default


@pytest.mark.parametrize(("flag", "path"), with_fields())
def test_a_field_has_the_range_of_its_flag(flag, path):
    setting, field = SETTINGS[flag], FIELDS[path]
    if field["type"] not in ("integer", "number") or path == "engine.classWeights[].weight":
        return
    step = 1 if field["type"] == "integer" else 0.001
    assert is_accepted(setting, field["minimum"]) is not field.get("exclusiveMinimum", False)
    assert not is_accepted(setting, field["minimum"] - step) or flag in OTHER_MINIMUM
    assert is_accepted(setting, field["maximum"])
    assert not is_accepted(setting, field["maximum"] + step)


def test_bounds_are_whole_numbers():
    """For a whole value of a number, such as 0, the API server truncates the bounds: 0 would be at least 0.01."""
    bounds = [field[end] for field in FIELDS.values() for end in ("minimum", "maximum") if end in field]
    assert all(isinstance(bound, int) for bound in bounds)


@pytest.mark.parametrize(("flag", "path"), with_fields())
def test_a_field_has_the_values_of_its_flag(flag, path):
    setting, field = SETTINGS[flag], FIELDS[path]
    if flag in OTHER_CHOICES:
        if flag not in ("tier", "device"):
            assert set(field["enum"]) < set(setting.choices)
    elif setting.parse is boolean:
        assert field["type"] == "boolean"
    else:
        assert list(field.get("enum", ())) == list(setting.choices)


@pytest.mark.parametrize("path", [path for path, field in FIELDS.items() if "enum" in field])
def test_values_of_flags_are_spelled_as_there_and_modes_are_camel_case(path):
    values = FIELDS[path]["enum"]
    if path in {*FIELD_OF.values(), *ALSO_OF}:
        assert all(value == value.lower() for value in values)
    else:
        assert all(re.fullmatch(r"([A-Z][a-zA-Z]+)", value) for value in values)


def test_pods_get_the_flags_of_all_fields_and_no_others():
    """Flags of a pool with every optional part."""
    full: dict[str, Any] = {
        "tls": {"mode": "Managed"},
        "engine": {"requestPolicy": "weighted", "classWeights": [{"priority": 0, "weight": 2}]},
        "gateway": {"apiKeysSecret": "k", "tlsSecret": "t", "clientCaSecret": "c", "state": {"url": "redis://r"}},
        "tenants": {"secretName": "q"},
        "observability": {"otlp": "http://c:4318"},
        "tiers": [{"type": "dram", "size": "1Gi"}],
    }
    for name, settings in (("prefill-REV", WORKER), ("gateway", GATEWAY)):
        container = made_of(pool(**full))[f"Deployment/chat-{name}"]["spec"]["template"]["spec"]["containers"][0]
        given = {arg.partition("=")[0] for arg in container["args"][1:]}
        variables = {"KVFERRY_TIER": "--tier", "KVFERRY_STATE": "--state"}
        given |= {variables[one["name"]] for one in container["env"] if one["name"] in variables}
        known = {setting.name: setting.flag for setting in (*settings, *LOGGING)}
        assert given <= set(known.values())
        assert {known[flag] for flag in FIELD_OF if flag in known} <= given
