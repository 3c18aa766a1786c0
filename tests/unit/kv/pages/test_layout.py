"""The layout: sizes, and a fingerprint that changes with every field."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.dtypes import DTYPES
from kvferry.kv.pages.layout import VERSION, KvLayout, described

SMOL = KvLayout("digest", "bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16)
SHARE = replace(SMOL, first_kv_head=1, total_kv_heads=6)


def layouts() -> st.SearchStrategy[KvLayout]:
    small = st.integers(1, 40)
    return st.builds(
        KvLayout,
        model_digest=st.text(st.sampled_from("0123456789abcdef"), min_size=1, max_size=4),
        dtype=st.sampled_from(DTYPES),
        num_layers=small,
        num_kv_heads=small,
        head_dim=small,
        block_tokens=small,
        planes=st.sampled_from([1, 2]),
    ).flatmap(shares)


def shares(whole: KvLayout) -> st.SearchStrategy[KvLayout]:
    """Return a strategy for the layout itself and for shares of models with more heads."""
    more = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda m: replace(whole, first_kv_head=m[0], total_kv_heads=sum(m) + whole.num_kv_heads)
    )
    return st.just(whole) | more


def test_sizes_are_the_arithmetic_of_keys_and_values() -> None:
    assert SMOL.token_bytes == 2 * 30 * 3 * 64 * 2 == 23_040
    assert SMOL.block_bytes == 16 * 23_040
    assert replace(SMOL, dtype="int8").token_bytes == 2 * 30 * 3 * (64 + 4) == 12_240
    latent = replace(SMOL, num_kv_heads=1, head_dim=576, planes=1)
    assert latent.token_bytes == 30 * 576 * 2
    assert latent.dims == (30, 1, 1, 16, 576)


@given(layouts(), layouts())
def test_fingerprints_are_equal_exactly_when_layouts_are(one: KvLayout, other: KvLayout) -> None:
    assert len(one.fingerprint) == 16
    assert (one.fingerprint == other.fingerprint) == (one == other)


@pytest.mark.parametrize("field", asdict(SHARE))
def test_every_field_counts(field: str) -> None:
    value = getattr(SHARE, field)
    changed = {"dtype": "float16", "model_digest": "other", "planes": 1, "windows": (8, 0) * 15}.get(
        field, value + 1 if isinstance(value, int) else value
    )
    assert replace(SHARE, **{field: changed}).fingerprint != SHARE.fingerprint


@given(layouts())
def test_a_description_contains_every_field(layout: KvLayout) -> None:
    assert described(layout.description) == layout
    assert described([*layout.description]) == layout, "a list, as in decoded messages"


def test_a_layout_with_all_heads_is_the_unshared_layout() -> None:
    assert replace(SMOL, total_kv_heads=3) == SMOL
    assert len(SMOL.description) == 7
    assert SHARE.description == (VERSION, "digest", "bfloat16", 30, 3, 64, 16, 1, 6)
    assert replace(SMOL, planes=1).description == (*SMOL.description, 1)
    assert replace(SHARE, planes=1).description == (*SHARE.description, 1)


@pytest.mark.parametrize(("start", "total"), [(1, None), (4, 6), (-1, 6), (0, 2)])
def test_heads_that_the_model_lacks_are_refused(start: int, total: int | None) -> None:
    with pytest.raises(ValueError, match="out of range"):
        replace(SMOL, first_kv_head=start, total_kv_heads=total)


@pytest.mark.parametrize("planes", [0, 3])
def test_other_numbers_of_planes_are_refused(planes: int) -> None:
    with pytest.raises(ValueError, match=f"planes must be 1 or 2, not {planes}"):
        replace(SMOL, planes=planes)


@pytest.mark.parametrize(
    "description",
    [
        (),
        (2, "digest", "bfloat16", 30, 3, 64, 16),
        SMOL.description[:-1],
        (*SMOL.description, 0),
        (*SMOL.description, 4, 6),
        (*SMOL.description, "1"),
        (*SHARE.description, 3),
        (*SHARE.description, 1, 1),
        (1, "digest", "int4", 30, 3, 64, 16),
        (1, 7, "bfloat16", 30, 3, 64, 16),
        (1, "d" * 300, "bfloat16", 30, 3, 64, 16),
        (1, "digest", "bfloat16", 30, 3, "64", 16),
        (1, "digest", "bfloat16", 0, 3, 64, 16),
        (1, "digest", "bfloat16", 30, 3, 64, -16),
        (1, "digest", "bfloat16", 30, 3, 64, 1 << 21),
        (1, "digest", "bfloat16", 1 << 20, 1 << 10, 64, 16),
    ],
)
def test_an_inconsistent_description_is_refused(description: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"layout|heads"):
        described(description)


@given(layouts(), layouts())
def test_a_family_shares_all_but_type_and_block_size(one: KvLayout, other: KvLayout) -> None:
    alike = replace(one, dtype=other.dtype, block_tokens=other.block_tokens)
    assert one.family == alike.family
    assert (one.family == other.family) == (alike == other)
