"""The layout: sizes by arithmetic, and a fingerprint that no change of meaning leaves alone."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.layout import DTYPE_BYTES, KvLayout

SMOL = KvLayout("digest", "bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16)


def layouts() -> st.SearchStrategy[KvLayout]:
    small = st.integers(1, 40)
    return st.builds(
        KvLayout,
        model_digest=st.text(st.sampled_from("0123456789abcdef"), min_size=1, max_size=4),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        num_layers=small,
        num_kv_heads=small,
        head_dim=small,
        block_tokens=small,
    )


def test_sizes_are_the_arithmetic_of_keys_and_values() -> None:
    assert SMOL.token_bytes == 2 * 30 * 3 * 64 * 2 == 23_040
    assert SMOL.block_bytes == 16 * 23_040


@given(layouts(), layouts())
def test_fingerprints_are_equal_exactly_when_layouts_are(one: KvLayout, other: KvLayout) -> None:
    assert len(one.fingerprint) == 16
    assert (one.fingerprint == other.fingerprint) == (one == other)


@pytest.mark.parametrize("field", asdict(SMOL))
def test_every_field_counts(field: str) -> None:
    value = getattr(SMOL, field)
    changed = {"dtype": "float16", "model_digest": "other"}.get(field, value + 1 if isinstance(value, int) else value)
    assert replace(SMOL, **{field: changed}).fingerprint != SMOL.fingerprint
