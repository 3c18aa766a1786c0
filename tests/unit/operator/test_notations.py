"""Revisions and writes depend on the values of a pool, not on their notation."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operator.pools import IMAGE, pool

from kvferry.operator.objects.worker_pods import revision_of
from kvferry.operator.plan.memory import digest_of
from kvferry.operator.pool.quantities import amount, is_quantity
from kvferry.operator.preview.admission import refusals
from kvferry.operator.preview.preview import preview

_UNITS = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12),
    "Ki": Fraction(1 << 10), "Mi": Fraction(1 << 20), "Gi": Fraction(1 << 30), "Ti": Fraction(1 << 40),
}  # fmt: skip


def decimal(value: Fraction) -> str:
    """Return a value in decimal notation; the denominators of the units divide powers of ten."""
    return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"


def written(value: Fraction, unit: str, zeros: int, is_signed: bool) -> str:
    """Write a value in a unit, with zeros behind the point, or a sign."""
    text = decimal(value / _UNITS[unit])
    text += "" if not zeros else ("0" if "." in text else ".0") * min(zeros, 1) + "0" * (zeros - 1)
    return ("+" if is_signed else "") + text + unit


def notations(value: Fraction) -> st.SearchStrategy[str]:
    exact = [unit for unit in _UNITS if Fraction(decimal(value / _UNITS[unit])) == value / _UNITS[unit]]
    return st.builds(written, st.just(value), st.sampled_from(exact), st.integers(0, 2), st.booleans())


AMOUNTS = st.integers(1, 1 << 22).map(lambda n: Fraction(n, 8))


def spec(cpu: Any, memory: Any, **engine: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "side", "resources": {"requests": {"cpu": cpu}}}]}}
    role = {"resources": {"requests": {"cpu": cpu, "memory": memory}}, "template": template, "engine": engine}
    return {
        "roles": [{"name": "prefill", **role}, {"name": "decode"}],
        "gateway": {"resources": {"limits": {"cpu": cpu}}},
    }


@given(AMOUNTS.flatmap(lambda value: st.tuples(st.just(value), notations(value))))
def test_an_amount_is_the_value_of_a_quantity(found):
    value, text = found
    assert is_quantity(text)
    assert Fraction(amount(text)) == value


@given(*[AMOUNTS.flatmap(lambda value: st.tuples(notations(value), notations(value)))] * 2)
def test_another_notation_is_no_change(cpu, memory):
    before, after = pool(**spec(cpu[0], memory[0])), pool(**spec(cpu[1], memory[1]))
    assert revision_of(before, IMAGE) == revision_of(after, IMAGE)
    assert preview(before, after, IMAGE).as_text().endswith("nothing to do")


@given(AMOUNTS, AMOUNTS, st.data())
def test_another_value_is_another_revision(one, other, data):
    cpus = data.draw(notations(one)), data.draw(notations(other))
    revisions = [revision_of(pool(**spec(cpu, "1Gi")), IMAGE) for cpu in cpus]
    assert (revisions[0] == revisions[1]) == (one == other)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (spec("1000m", "512Mi"), spec("1", "0.5Gi")),
        (spec(1, 536870912), spec("1.0", "512Mi")),
        (spec(2, "1e3"), spec(2.0, "1k")),
        (spec(1, 1, kvMemory="512Mi"), spec(1, 1, kvMemory="0.5Gi")),
        (spec(1, 1, kvMemory="1Gi"), spec(1, 1, kvMemory="1024MiB")),
        (spec(1, 1, adapterMemory="2Gi"), spec(1, 1, adapterMemory="2048Mi")),
        ({"tiers": [{"type": "dram", "size": "1024Mi"}]}, {"tiers": [{"type": "dram", "size": "1Gi"}]}),
    ],
)
def test_notations_of_one_value(before, after):
    assert revision_of(pool(**before), IMAGE) == revision_of(pool(**after), IMAGE)
    assert preview(pool(**before), pool(**after), IMAGE).as_text().endswith("nothing to do")


def test_a_manifest_of_another_notation_is_not_applied_again():
    volumes = [
        {"volumes": [{"emptyDir": {"sizeLimit": size}}], "replicas": n} for size, n in (("1Gi", 1), ("1024Mi", 1.0))
    ]
    assert digest_of(volumes[0]) == digest_of(volumes[1])


@pytest.mark.parametrize("text", ["", "1.5.2", "Gi", "1gi", "1 Gi", "0x10", "1Ei5", "NaN", "1_000", "٣", "-", "1e"])
def test_what_is_no_quantity(text):
    assert not is_quantity(text)
    assert amount(text) == text
    assert refusals({**_BODY, "spec": {**_BODY["spec"], **spec(text, "1Gi")}}) != []


_BODY: dict[str, Any] = {
    "apiVersion": "kvferry.dev/v1alpha1",
    "kind": "InferencePool",
    "metadata": {"name": "chat"},
    "spec": {"model": {"name": "m"}},
}
