"""Every transport passes the conformance suite, against another real process where possible."""

from collections.abc import Callable

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.ids import new_incarnation
from kvferry.kv import registry
from kvferry.testing import connector_suite


@pytest.mark.parametrize("check", connector_suite.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", registry.names())
def test_connector(name: str, check: Callable[[connector_suite.ConnectorRig], None]) -> None:
    with connector_suite.rig(name) as rig:
        check(rig)


@pytest.mark.parametrize("size", connector_suite.PAGE_SIZES)
@pytest.mark.parametrize("check", connector_suite.RAW_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", registry.names())
def test_pages_of_another_size(name: str, check: Callable[[connector_suite.ConnectorRig], None], size: int) -> None:
    with connector_suite.rig(name, size, connector_suite.FEWER_BLOCKS) as rig:
        check(rig)


def test_an_unknown_connector_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="use one of memory, nixl, shm, tcp"):
        registry.open_transport("pigeon", new_incarnation())


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._MODULES, "nixl", "kvferry.kv.connectors.not_there")
    with pytest.raises(UsageError, match=r"pip install 'kvferry\[nixl\]'"):
        registry.open_transport("nixl", new_incarnation())
