"""Conversion of EndpointSlices to listings of workers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.decide.routing import discovery
from kvferry.gateway.decide.routing.discovery import MAX_LISTINGS, Listing, SliceCache, WatchEnded, listings_of


def endpoint(ip: str, pod: str | None = None, **conditions: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"addresses": [ip]}
    if pod is not None:
        found["targetRef"] = {"kind": "Pod", "name": pod}
    if conditions:
        found["conditions"] = conditions
    return found


def a_slice(role: str, *endpoints: dict[str, Any], name: str = "s", **fields: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "resourceVersion": "7",
            "labels": {"kvferry.dev/pool": "p", "kvferry.dev/role": role},
        },
        "addressType": "IPv4",
        "ports": [{"name": "grpc", "port": 9100}, {"name": "admin", "port": 9101}],
        "endpoints": list(endpoints),
        **fields,
    }


def test_each_endpoint_is_a_worker_with_its_pods_name_and_both_ports():
    found = listings_of(
        [a_slice("prefill", endpoint("10.0.0.1", "p-0")), a_slice("decode", endpoint("10.0.0.2", "d-0"))]
    )
    assert found == (
        Listing("d-0", "decode", Endpoint("10.0.0.2:9100", "10.0.0.2:9101")),
        Listing("p-0", "prefill", Endpoint("10.0.0.1:9100", "10.0.0.1:9101")),
    )


def test_role_both_is_listed():
    assert [listing.role for listing in listings_of([a_slice("both", endpoint("10.0.0.1", "c"))])] == ["both"]


@pytest.mark.parametrize("role", ["", "router", "mixed", "Prefill"])
def test_an_unknown_role_is_left_out(role):
    assert listings_of([a_slice(role, endpoint("10.0.0.1", "x"))]) == ()


def test_addresses_of_ipv6_are_bracketed_and_written_in_one_way():
    found = listings_of([a_slice("decode", endpoint("FD00:0::1", "d"), addressType="IPv6")])
    assert found[0].endpoint == Endpoint("[fd00::1]:9100", "[fd00::1]:9101")


def test_a_pod_with_an_address_of_each_family_is_one_worker():
    six = a_slice("decode", endpoint("fd00::1", "d-0"), addressType="IPv6", name="six")
    four = a_slice("decode", endpoint("10.0.0.1", "d-0"), name="four")
    for order in ([six, four], [four, six]):
        assert [listing.endpoint.address for listing in listings_of(order)] == ["10.0.0.1:9100"]


@pytest.mark.parametrize(
    ("address", "family"),
    [("10.0.0.1", "IPv6"), ("fd00::1", "IPv4"), ("host", "IPv4"), ("", "IPv4"), ("evil.example", "FQDN"), (7, "IPv4")],
)
def test_invalid_addresses_of_a_family_are_left_out(address, family):
    assert listings_of([a_slice("decode", endpoint(address, "d"), addressType=family)]) == ()


def test_without_a_work_port_there_is_no_worker_and_without_an_admin_port_there_is_one_port():
    assert listings_of([a_slice("decode", endpoint("10.0.0.1", "d"), ports=[{"name": "admin", "port": 9101}])]) == ()
    found = listings_of([a_slice("decode", endpoint("10.0.0.1", "d"), ports=[{"name": "grpc", "port": 9100}])])
    assert found[0].endpoint == Endpoint("10.0.0.1:9100", "10.0.0.1:9100")


@pytest.mark.parametrize("port", [0, -1, 65536, "9100", None, True, 9100.0])
def test_invalid_ports_are_ignored(port):
    assert listings_of([a_slice("decode", endpoint("10.0.0.1", "d"), ports=[{"name": "grpc", "port": port}])]) == ()


def test_only_a_terminating_endpoint_is_stopping():
    found = listings_of(
        [
            a_slice(
                "decode",
                endpoint("10.0.0.1", "absent"),
                endpoint("10.0.0.2", "starting", ready=False, serving=False, terminating=False),
                endpoint("10.0.0.3", "stopping", ready=False, serving=True, terminating=True),
                {**endpoint("10.0.0.4", "null"), "conditions": None},
            )
        ]
    )
    assert {listing.name: listing.stopping for listing in found} == {
        "absent": False,
        "starting": False,
        "stopping": True,
        "null": False,
    }


def test_an_endpoint_without_a_pod_has_its_address_for_a_name():
    (listing,) = listings_of([a_slice("decode", endpoint("10.0.0.1"))])
    assert listing.name == listing.endpoint.address


def test_several_slices_of_a_service_are_one_list_and_a_pod_in_two_of_them_is_one_worker():
    first = a_slice("decode", endpoint("10.0.0.1", "d-0"), endpoint("10.0.0.2", "d-1"), name="a")
    second = a_slice("decode", endpoint("10.0.0.2", "d-1", terminating=True), endpoint("10.0.0.3", "d-2"), name="b")
    found = listings_of([first, second])
    assert [(listing.name, listing.stopping) for listing in found] == [("d-0", False), ("d-1", True), ("d-2", False)]
    assert found == listings_of([second, first])


def test_of_two_pods_at_one_address_the_one_that_is_not_stopping_is_used():
    old = endpoint("10.0.0.1", "a-old", terminating=True)
    new = endpoint("10.0.0.1", "b-new")
    assert [listing.name for listing in listings_of([a_slice("decode", old, new)])] == ["b-new"]


def test_too_many_are_cut_off(monkeypatch):
    monkeypatch.setattr(discovery, "MAX_LISTINGS", 3)
    many = [endpoint(f"10.0.0.{i}", f"d-{i}") for i in range(1, 9)]
    assert len(listings_of([a_slice("decode", *many)])) == 3


_PATHS: tuple[tuple[Any, ...], ...] = (
    *((key,) for key in ("metadata", "addressType", "ports", "endpoints")),
    *(("metadata", key) for key in ("name", "labels", "resourceVersion")),
    ("metadata", "labels", "kvferry.dev/role"),
    *(("ports", 0, *rest) for rest in ((), ("name",), ("port",))),
    *(("endpoints", 0, *rest) for rest in ((), ("addresses",), ("addresses", 0), ("targetRef",), ("conditions",))),
    ("endpoints", 0, "targetRef", "name"),
    ("endpoints", 0, "conditions", "terminating"),
)
_JUNK = st.sampled_from([None, True, -1, 1e300, "", "x", "x" * 300, [], [None], {}, {"name": {}}, [[]], [{"port": 1}]])


@given(st.lists(st.tuples(st.sampled_from(_PATHS), _JUNK), min_size=1, max_size=4))
def test_an_invalid_endpoint_of_one_worker_does_not_hide_the_other(changes):
    spoiled = a_slice("decode", endpoint("10.0.0.1", "d-0", terminating=False))
    for path, junk in changes:
        inside: Any = spoiled
        try:
            for step in path[:-1]:
                inside = inside[step]
            inside[path[-1]] = junk
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change removed the path
    found = listings_of([spoiled, a_slice("prefill", endpoint("10.0.0.9", "p-0"))])
    assert "p-0" in {listing.name for listing in found}
    assert len(found) <= 2
    cache = SliceCache()
    cache.replace({"items": [spoiled, None], "metadata": None})
    cache.apply({"type": "ADDED", "object": spoiled})
    assert len(cache.listings()) <= 1


_ENDPOINTS = st.builds(
    endpoint,
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
    st.sampled_from(["a", "b", "c", None]),
    terminating=st.booleans(),
)
_SLICES = st.lists(
    st.builds(
        lambda role, endpoints: a_slice(role, *endpoints),
        st.sampled_from(["prefill", "decode", "both", "other"]),
        st.lists(_ENDPOINTS, max_size=5),
    ),
    max_size=4,
)


@given(_SLICES, st.randoms())
def test_addresses_and_pods_are_unique_and_the_order_of_slices_does_not_matter(slices, dice):
    found = listings_of(slices)
    assert len({listing.endpoint.address for listing in found}) == len(found) <= MAX_LISTINGS
    assert len({(listing.name, listing.role) for listing in found}) == len(found)
    shuffled = [{**one, "endpoints": dice.sample(one["endpoints"], len(one["endpoints"]))} for one in slices]
    dice.shuffle(shuffled)
    assert listings_of(shuffled) == found


def event(kind: str, found: dict[str, Any], version: str = "8") -> dict[str, Any]:
    return {"type": kind, "object": {**found, "metadata": {**found["metadata"], "resourceVersion": version}}}


def test_a_watch_continues_at_the_version_of_the_list():
    cache = SliceCache()
    assert cache.version == ""
    cache.replace(
        {"metadata": {"resourceVersion": "5"}, "items": [a_slice("decode", endpoint("10.0.0.1", "d-0"), name="a")]}
    )
    assert cache.version == "5"
    assert cache.apply(event("ADDED", a_slice("prefill", endpoint("10.0.0.2", "p-0"), name="b"), "6"))
    assert cache.apply(event("MODIFIED", a_slice("decode", endpoint("10.0.0.3", "d-1"), name="a"), "7"))
    assert [listing.name for listing in cache.listings()] == ["d-1", "p-0"]
    assert cache.apply(event("DELETED", a_slice("prefill", name="b"), "8"))
    assert not cache.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    assert not cache.apply({"type": "SOMETHING", "object": {"metadata": {"resourceVersion": "99"}}})
    assert not cache.apply({"type": "BOOKMARK", "object": {}})
    assert ([listing.name for listing in cache.listings()], cache.version) == (["d-1"], "9")


def test_a_list_removes_the_slices_that_it_lacks():
    cache = SliceCache()
    cache.replace({"metadata": {"resourceVersion": "5"}, "items": [a_slice("decode", endpoint("10.0.0.1", "d-0"))]})
    cache.replace({"metadata": {"resourceVersion": "6"}, "items": []})
    assert cache.listings() == ()


@pytest.mark.parametrize(("code", "version"), [(410, ""), (500, "5")])
def test_an_error_ends_the_watch_and_only_an_expired_version_requires_a_list(code, version):
    cache = SliceCache()
    cache.replace({"metadata": {"resourceVersion": "5"}, "items": []})
    with pytest.raises(WatchEnded, match=str(code)):
        cache.apply({"type": "ERROR", "object": {"code": code, "message": "too old"}})
    assert cache.version == version
