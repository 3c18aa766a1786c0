"""Children that are deleted in a gap of a watch are restored although no event reports the deletion."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster.operators import CLOCK, AnOperator, Kube, a_cluster, a_pool, an_operator, eventually, fake_pods
from cluster.watch_relay import a_watch_relay

pytestmark = pytest.mark.cluster

RESTORED_SECONDS = 20.0
"""Bound in seconds on a machine that runs other tests at the same time."""
CENSUS_SECONDS = 6.0
"""Time in seconds from the first census to the second one, and a second more."""


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.mark.parametrize(
    ("plural", "child"),
    [
        pytest.param("services", "service/chat-decode", id="others-of-the-kind-are-left"),
        pytest.param("rolebindings", "rolebinding/chat-gateway", id="none-of-the-kind-is-left"),
    ],
)
def test_a_child_deleted_in_a_gap_of_the_watch_is_restored(kube: Kube, plural: str, child: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        relay = stack.enter_context(a_watch_relay(kube.kubeconfig))
        file = relay.write_kubeconfig(tmp_path / "kubeconfig")
        namespace = stack.enter_context(kube.namespace())
        stack.enter_context(fake_pods(kube, namespace))
        # The periodic probe of the watches, which also meets deleted objects, is later than the bound.
        operator = stack.enter_context(an_operator(file, namespace, "--watch-probe-seconds", "600"))
        kube.apply(a_pool(namespace))
        kube.rolled_out(namespace)
        eventually(lambda: relay.num_watches(plural) == 1, f"watch of {plural}")
        wait_for_the_census_of_the_start(operator)
        with relay.gap(plural):
            kube.kubectl("delete", child, "-n", namespace)
        begun = CLOCK.monotonic()
        eventually(
            lambda: kube.kubectl("get", child, "-n", namespace, "--ignore-not-found").strip(), child, RESTORED_SECONDS
        )
        print(f"{child} restored {CLOCK.monotonic() - begun:.1f} s after the gap")


def wait_for_the_census_of_the_start(operator: AnOperator) -> None:
    """Wait until no kind was listed for longer than the time from the start to the second census."""
    since, before = CLOCK.monotonic(), -1.0

    def is_over() -> bool:
        nonlocal since, before
        lists = operator.numbers()['kvferry_operator_api_calls_total{kind="NetworkPolicy",method="GET"}']
        if lists != before:
            since, before = CLOCK.monotonic(), lists
        return CLOCK.monotonic() - since > CENSUS_SECONDS

    eventually(is_over, "the census of the start")
