"""Calls to the API server for one change of a pool, compared with docs/performance.md."""

from collections.abc import Callable, Iterator

import pytest
from cluster.operators import CLOCK, AnOperator, Kube, a_cluster, a_pool, an_operator, eventually, fake_pods

pytestmark = pytest.mark.cluster

WATCH_PROBE_SECONDS = 3600
"""Longer than the test, because the probe writes too."""


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


def calls(operator: AnOperator) -> dict[str, float]:
    prefix = "kvferry_operator_api_calls_total{"
    numbers = {name.removeprefix(prefix): n for name, n in operator.numbers().items() if name.startswith(prefix)}
    at_rest = ('kind="Lease"', 'kind="SecretDryRun"')  # these calls are made without any change
    return {name: n for name, n in numbers.items() if not any(kind in name for kind in at_rest)}


def cost(operator: AnOperator, change: Callable[[], None]) -> dict[str, float]:
    before = calls(operator)
    change()
    after, since = calls(operator), CLOCK.monotonic()

    def still() -> bool:
        nonlocal after, since
        now = calls(operator)
        if now != after or operator.numbers()["kvferry_operator_queued_pools"]:
            after, since = now, CLOCK.monotonic()
        return CLOCK.monotonic() - since > 2

    eventually(still)
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def test_the_api_calls_of_each_change(kube: Kube) -> None:
    with (
        kube.namespace() as namespace,
        fake_pods(kube, namespace),
        an_operator(kube.kubeconfig, namespace, "--watch-probe-seconds", str(WATCH_PROBE_SECONDS)) as operator,
    ):
        # The first pool starts the first watch probe and the census.
        kube.apply(a_pool(namespace, "first"))
        kube.rolled_out(namespace, "first")
        # The census of the last kinds makes two lists and a check of the owner.
        eventually(lambda: calls(operator).get('kind="NetworkPolicy",method="GET"}', 0) >= 3, "the second census")
        # Only the watch probe patches records.
        eventually(lambda: calls(operator).get('kind="ControllerRevision",method="PATCH"}', 0) >= 1, "the watch probe")

        def made() -> None:
            kube.apply(a_pool(namespace))
            kube.rolled_out(namespace)

        def edited() -> None:
            kube.change(namespace, image="kvferry:two")
            kube.rolled_out(namespace)

        def scaled() -> None:
            kube.change(namespace, roles=[{"name": "prefill"}, {"name": "decode", "replicas": 2}])
            kube.rolled_out(namespace)

        counts = {
            name: cost(operator, change) for name, change in (("made", made), ("edited", edited), ("scaled", scaled))
        }
        total = {name: sum(found.values()) for name, found in counts.items()}
        print(*(f"{name}: {total[name]:.0f} {found}" for name, found in counts.items()), sep="\n")
        assert total["made"] <= 70
        assert total["edited"] <= 36
        assert total["scaled"] <= 11
