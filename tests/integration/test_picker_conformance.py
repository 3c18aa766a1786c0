"""The data path of the conformance tests of the Gateway API Inference Extension, through a real Envoy.

The suite itself needs a cluster, and tests a gateway with a picker of its own that obeys the header
`test-epp-endpoint-selection`. Here the subset plays that part: the client names the endpoints, and the picker must
choose among them. Tests of the status of objects concern the gateway's controller, and no picker.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from harness.servers.envoy import EnvoyMode, envoy, envoy_path
from harness.servers.model_server import ModelServer, model_servers
from harness.servers.picker_client import destination, head_message, picker_stub, read, response_message
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.picker.config import PickerConfig, ScrapeConfig
from kvferry.picker.decide.endpoints import PoolEndpoint
from kvferry.picker.decide.pool_pods import PodCache, PodSelection, pool_endpoint
from kvferry.picker.picker_process import Picker

SECONDS = 20.0
pytestmark = pytest.mark.skipif(envoy_path() is None, reason="Envoy is not installed")
SUBSET = "x-gateway-destination-endpoint-subset"
PROMPT = {"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}

CASES = {
    "EppUnAvailableFailOpen": "test_a_picker_that_is_gone",
    "GatewayDestinationEndpointServed": "test_the_endpoint_that_served_is_noted",
    "GatewayFollowingEPPRouting": "test_traffic_reaches_only_the_chosen_endpoints",
    "GatewayFollowingEPPRoutingWithDataParallelism": "test_each_port_of_a_pod_is_an_endpoint",
    "GatewayWeightedAcrossTwoInferencePools": "test_each_pool_has_its_own_picker",
    "HTTPRouteMultipleGatewaysDifferentPools": "test_each_pool_has_its_own_picker",
    "InferencePoolHTTPRoutePortValidation": "",
    "HTTPRouteInvalidInferencePoolRef": "",
    "InferencePoolAccepted": "",
    "InferencePoolAppProtocol": "test_a_pool_of_http2_servers",
    "InferencePoolInvalidEPPService": "",
    "InferencePoolMissingEPPRef": "",
    "HTTPRouteMultipleRulesDifferentPools": "test_each_pool_has_its_own_picker",
    "InferencePoolResolvedRefsCondition": "",
}
"""Upstream test, and the test here that covers its data path; empty where it tests only the status of objects."""


async def picker_of(stack: AsyncExitStack, endpoints: Sequence[str]) -> Picker:
    """Run a picker that has scraped its endpoints."""
    listed = [PoolEndpoint(address, address, address) for address in endpoints]
    config = PickerConfig(endpoints=listed, is_plaintext=True, scrape=ScrapeConfig(seconds=0.05), drain_seconds=1.0)
    picker = await Picker.start(config, SystemClock())
    stack.push_async_callback(picker.stop)
    await eventually(lambda: picker.scraper.num_rounds > 0, SECONDS)
    return picker


async def gateway_of(stack: AsyncExitStack, picker: Picker, folder: Path, mode: EnvoyMode) -> httpx.AsyncClient:
    """Run Envoy in front of a picker; return its client."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    url = await stack.enter_async_context(envoy(picker.listening.grpc, folder, mode))
    return await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SECONDS))


def test_the_table_names_tests_of_this_file():
    assert {name for name in CASES.values() if name} <= set(globals())
    assert len(CASES) == 14


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_traffic_reaches_only_the_chosen_endpoints(number, tmp_path):
    servers = [ModelServer() for _ in range(3)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(*servers))
        addresses = [server.address for server in servers]
        http = await gateway_of(stack, await picker_of(stack, addresses), tmp_path, EnvoyMode())
        slots = asyncio.Semaphore(10)

        async def post() -> str:
            async with slots:
                answer = await http.post("/v1/completions", json=PROMPT, headers={SUBSET: ",".join(addresses[:number])})
            assert answer.status_code == 200
            return str(answer.json()["served_by"])

        assert set(await asyncio.gather(*(post() for _ in range(100)))) <= set(addresses[:number])


async def test_the_endpoint_that_served_is_noted(tmp_path):
    servers = [ModelServer() for _ in range(3)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(*servers))
        addresses = [server.address for server in servers]
        picker = await picker_of(stack, addresses)
        http = await gateway_of(stack, picker, tmp_path, EnvoyMode())
        for address in addresses:
            answer = await http.post("/v1/completions", json=PROMPT, headers={SUBSET: address})
            assert answer.headers["x-served-by"] == address
        # Envoy alone does not report the endpoint; a gateway does, in metadata of the response.
        stub = await stack.enter_async_context(picker_stub(picker.listening.grpc))
        call = stub.open()
        await call.write(head_message({SUBSET: addresses[0]}, is_end=True))
        assert destination(await read(call)) == addresses[0]
        await call.write(response_message(200, addresses[1]))
        await read(call)
        await call.done_writing()
        found = picker.metrics.registry.get_sample_value("kvferry_picker_served_total", {"outcome": "fallback"})
        assert found == 1


async def test_each_port_of_a_pod_is_an_endpoint(tmp_path):
    servers = [ModelServer(), ModelServer()]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(*servers))
        ports = [int(server.address.rpartition(":")[2]) for server in servers]
        pool = {"spec": {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": port} for port in ports]}}
        pods = PodCache()
        ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        pods.replace({"items": [{"metadata": {"name": "pod"}, "status": ready}]})
        pods.ports = PodSelection.read(pool).ports
        picker = await picker_of(stack, [])
        picker.pool.states.follow(pool_endpoint(listing, 0) for listing in pods.listings())
        http = await gateway_of(stack, picker, tmp_path, EnvoyMode())
        for server in servers:
            answer = await http.post("/v1/completions", json=PROMPT, headers={SUBSET: server.address})
            assert answer.json()["served_by"] == server.address


async def test_each_pool_has_its_own_picker(tmp_path):
    primary, secondary = ModelServer(), ModelServer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(primary, secondary))
        for server in (primary, secondary):
            picker = await picker_of(stack, [server.address])
            port = server.address.rpartition(":")[2]
            http = await gateway_of(stack, picker, tmp_path / port, EnvoyMode())
            for _ in range(5):
                assert (await http.post("/v1/completions", json=PROMPT)).json()["served_by"] == server.address
            other = (secondary if server is primary else primary).address
            refused = await http.post("/v1/completions", json=PROMPT, headers={SUBSET: other})
            assert refused.status_code == 503, "an endpoint of another pool is never chosen"


async def test_a_picker_that_is_gone(tmp_path):
    server = ModelServer()
    mode = EnvoyMode(by_override=True, fails_open=True, body="BUFFERED", response_body="NONE")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = await picker_of(stack, [server.address])
        http = await gateway_of(stack, picker, tmp_path, replace(mode, endpoints=(server.address,)))
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
        await picker.stop()
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_a_pool_of_http2_servers(tmp_path):
    """A picker does not see the protocol between gateway and server: a body of gRPC is routed by load."""
    server = ModelServer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(server))
        picker = await picker_of(stack, [server.address])
        http = await gateway_of(stack, picker, tmp_path, EnvoyMode())
        framed = b"\x00\x00\x00\x00\x05hello"
        answer = await http.post("/pkg.Service/Call", content=framed, headers={"content-type": "application/grpc"})
        assert answer.status_code == 200
        assert server.bodies == [framed]
        found = picker.metrics.registry.get_sample_value("kvferry_picker_bodies_total", {"problem": "not_json"})
        assert found == 1
