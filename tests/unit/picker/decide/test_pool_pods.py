"""Endpoints of an InferencePool's pods."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.picker.decide.pool_pods import PodCache, PodSelection, pool_endpoint

POOL = {"spec": {"selector": {"matchLabels": {"app": "llama", "tier": "x"}}, "targetPorts": [{"number": 8000}]}}


def pod(name: str, host: object = "10.0.0.1", *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {"podIP": host, "conditions": [{"type": "Ready", "status": ready}]},
    }


def cache(*pods: dict[str, Any], ports: tuple[int, ...] = (8000,)) -> PodCache:
    found = PodCache()
    found.replace({"items": list(pods), "metadata": {"resourceVersion": "1"}})
    found.ports = ports
    return found


def test_the_selector_and_the_ports_of_a_pool() -> None:
    assert PodSelection.read(POOL) == PodSelection("app=llama,tier=x", (8000,))


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"spec": None},
        {"spec": {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]}},
        {"spec": {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []}},
        {"spec": {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 0}, {"number": True}, 5]}},
        {"spec": {"selector": {"matchLabels": {f"a{n}": "b" for n in range(65)}}, "targetPorts": [{"number": 1}]}},
    ],
)
def test_a_pool_without_pods_or_ports_is_an_error(found: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"selector\.matchLabels"):
        PodSelection.read(found)


def test_ready_pods_are_endpoints() -> None:
    found = cache(pod("b", "10.0.0.2"), pod("a"), pod("c", "10.0.0.3", ready="False"), pod("d", None), {}).listings()
    assert [(one.name, one.endpoint.address, one.place.node) for one in found] == [
        ("a", "10.0.0.1:8000", "node-1"),
        ("b", "10.0.0.2:8000", "node-1"),
    ]


def test_each_port_is_an_endpoint() -> None:
    found = cache(pod("a", "fd00::1"), ports=(8000, 8001)).listings()
    assert [(one.name, one.endpoint.address) for one in found] == [
        ("a:8000", "[fd00::1]:8000"),
        ("a:8001", "[fd00::1]:8001"),
    ]


def test_a_pod_that_is_deleted_gets_nothing_new() -> None:
    (found,) = cache(pod("a", ready="False", deletionTimestamp="2026-11-01T00:00:00Z")).listings()
    assert found.stopping
    assert pool_endpoint(found, 0).is_stopping


@pytest.mark.parametrize(
    ("labels", "prefill"),
    [
        ({"llm-d.ai/role": "prefill"}, True),
        ({"kvferry.dev/role": "prefill"}, True),
        ({"llm-d.ai/role": "decode", "kvferry.dev/role": "prefill"}, False),
        ({"llm-d.ai/role": 5}, False),
        ({}, False),
    ],
)
def test_a_label_says_who_computes_prompts(labels: dict[str, Any], prefill: bool) -> None:
    (found,) = cache(pod("a", labels=labels)).listings()
    assert pool_endpoint(found, 0).is_prefill is prefill


def test_metrics_may_have_a_port_of_their_own() -> None:
    (found,) = cache(pod("a", "fd00::1")).listings()
    assert pool_endpoint(found, 9000).metrics_address == "[fd00::1]:9000"
    assert pool_endpoint(found, 0).metrics_address == "[fd00::1]:8000"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["metadata", "status", "name", "podIP", "conditions"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_malformed_pods_are_left_out(found: Any) -> None:
    assert cache(found if isinstance(found, dict) else {"status": found}).listings() == ()
