"""Block names: a keyed chain of hashes that depends on every input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.hashing import SALT_DIGEST_CHARS, BlockNamer, BlockNamers, cache_scope
from kvferry.core.ids import BlockHash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def namer(**changes: object) -> BlockNamer:
    arguments: dict[str, object] = {"tenant": b"t", "fingerprint": b"f", "block_tokens": 4, "extra": b""}
    return BlockNamer(**{**arguments, **changes})  # type: ignore[arg-type]


@given(TOKENS, TOKENS)
def test_equal_prefixes_have_equal_names_and_only_they(a: list[int], b: list[int]) -> None:
    one, two = namer().chain(a), namer().chain(b)
    for i, (x, y) in enumerate(zip(one, two, strict=False)):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


@given(TOKENS)
def test_a_chain_names_full_blocks_and_grows_by_appending(tokens: list[int]) -> None:
    names = namer().chain(tokens)
    assert len(names) == len(tokens) // 4
    assert namer().chain([*tokens, 1, 2, 3, 4])[: len(names)] == names
    one_by_one: list[BlockHash] = []
    for start in range(0, 4 * len(names), 4):
        one_by_one.append(namer().name(one_by_one[-1] if one_by_one else None, tokens[start : start + 4]))
    assert names == one_by_one
    middle = len(names) // 2
    assert namer().chain(tokens[4 * middle :], names[middle - 1] if middle else None) == names[middle:]


@pytest.mark.parametrize("change", [{"tenant": b"u"}, {"fingerprint": b"g"}, {"extra": b"x"}])
def test_tenant_layout_and_tokens_change_the_names(change: dict[str, object]) -> None:
    assert namer(**change).chain([1, 2, 3, 4]) != namer().chain([1, 2, 3, 4])


def test_the_boundary_between_tenant_and_fingerprint_changes_the_name() -> None:
    assert namer(tenant=b"ab", fingerprint=b"c").chain([1] * 4) != namer(tenant=b"a", fingerprint=b"bc").chain([1] * 4)


@pytest.mark.parametrize("bad", [{"block_tokens": 0}, {"extra": bytes(70_000)}])
def test_impossible_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"positive|extra"):
        namer(**bad)


def test_a_name_is_of_exactly_one_block_of_32_bit_tokens() -> None:
    with pytest.raises(ValueError, match="4 tokens, not 3"):
        namer().name(None, [1, 2, 3])
    with pytest.raises(OverflowError):
        namer().name(None, [1, 2, 3, 2**32])


def test_namers_of_tenants_and_layouts_differ_and_are_bounded() -> None:
    namers = BlockNamers(b"key")
    tokens = [1, 2, 3, 4]
    first = namers.of("t0", fingerprint=b"f", block_tokens=4)
    assert namers.of("t0", fingerprint=b"f", block_tokens=4) is first
    others = [("t1", b"f", 4), ("t0", b"g", 4), ("t0", b"f", 2)]
    names = {namers.of(t, fingerprint=f, block_tokens=b).chain(tokens)[0] for t, f, b in others}
    assert len({first.chain(tokens)[0], *names}) == 4
    assert BlockNamers(b"other").of("t0", fingerprint=b"f", block_tokens=4).chain(tokens) != first.chain(tokens)
    for i in range(3000):
        namers.of(f"t{i}", fingerprint=b"f", block_tokens=4)
    assert len(namers._namers) <= 1024
    assert namers.of("t0", fingerprint=b"f", block_tokens=4).chain(tokens) == first.chain(tokens)


def test_a_salt_separates_scopes_and_adds_a_bounded_number_of_characters() -> None:
    assert cache_scope("tenant", "") == "tenant"
    scopes = {cache_scope(tenant, salt) for tenant in ("a", "b") for salt in ("", "x", "y" * 1000, "\ud800")}
    assert len(scopes) == 8
    assert all(len(scope) <= 1 + SALT_DIGEST_CHARS for scope in scopes)
