"""Every transport passes the conformance suite, against another real process where possible."""

import os
import resource
from collections.abc import Callable

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.ids import new_incarnation
from kvferry.kv import registry
from kvferry.kv.connectors.nixl_peers import check_open_files
from kvferry.kv.interface.connector import ReadError, TransportSetup
from kvferry.testing import connector_suite

MODES = [
    *(pytest.param(name, connector_suite.SETUP, id=name) for name in registry.names()),
    pytest.param("tcp", connector_suite.ENCRYPTED, id="tcp-encrypted"),
]


@pytest.mark.parametrize("check", connector_suite.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize(("name", "setup"), MODES)
def test_connector(name: str, setup: TransportSetup, check: Callable[[connector_suite.ConnectorRig], None]) -> None:
    with connector_suite.rig(name, setup=setup) as rig:
        check(rig)


@pytest.mark.parametrize("size", connector_suite.PAGE_SIZES)
@pytest.mark.parametrize("check", connector_suite.RAW_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize(("name", "setup"), MODES)
def test_pages_of_another_size(
    name: str, setup: TransportSetup, check: Callable[[connector_suite.ConnectorRig], None], size: int
) -> None:
    with connector_suite.rig(name, size, connector_suite.FEWER_BLOCKS, setup) as rig:
        check(rig)


def test_encryption_that_a_connector_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'nixl' does not encrypt KV; use connector 'tcp'") as caught:
        registry.open_transport("nixl", new_incarnation(), connector_suite.ENCRYPTED)
    assert caught.value.field == "kv_encryption"


@pytest.mark.parametrize("name", ["memory", "shm"])
def test_bytes_that_never_leave_the_host_need_no_encryption(name: str) -> None:
    with connector_suite.rig(name, setup=connector_suite.ENCRYPTED) as rig:
        connector_suite.check_pages_arrive_exactly(rig)


def test_an_unknown_connector_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="use one of memory, nixl, shm, tcp"):
        registry.open_transport("pigeon", new_incarnation())


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._MODULES, "nixl", "kvferry.kv.connectors.not_there")
    with pytest.raises(UsageError, match=r"pip install 'kvferry\[nixl\]'"):
        registry.open_transport("nixl", new_incarnation())


def test_a_peer_that_is_forgotten_and_reconnected_costs_no_open_files() -> None:
    with connector_suite.rig("nixl") as rig:
        counts = []
        for _ in range(6):
            rig.transport.connect(rig.peer, rig.address)
            assert rig.transport.read_epochs(rig.peer, [0], 10.0)
            counts.append(len(os.listdir("/proc/self/fd")))
            rig.transport.forget(rig.peer)
        assert len(set(counts)) == 1


def test_no_agent_is_added_near_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_open_files("a")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))
    try:
        with pytest.raises(ReadError, match=r"worker a.*ulimit -n"):
            check_open_files("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
