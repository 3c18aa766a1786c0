"""Every tier passes the conformance suite over real storage: files, and a redis-server of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.servers.tier_rigs import RIGS, Servers, dram_rig, rigs

from kvferry.testing import frame_suite, tier_suite


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.mark.parametrize(
    "check",
    [*tier_suite.CHECKS, *frame_suite.FRAMED_CHECKS],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
@pytest.mark.parametrize("name", RIGS)
def test_tier(name: str, check: Callable[[tier_suite.TierRig], None], tmp_path: Path, servers: Servers) -> None:
    with rigs(tmp_path, servers)[name]() as rig:
        check(rig)


@pytest.mark.parametrize("check", tier_suite.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_dram(check: Callable[[tier_suite.TierRig], None]) -> None:
    with dram_rig() as rig:
        check(rig)
