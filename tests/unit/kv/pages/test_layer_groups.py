"""Groups of layers: every layer has one place, and layers of a group have one window."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.pages.layer_groups import LayerGroups, choose_groups, first_block_read, max_blocks
from kvferry.model import tiny

WINDOWS = st.lists(st.sampled_from([None, 8, 100]), min_size=1, max_size=40)


@given(WINDOWS)
def test_every_layer_has_one_place_in_a_group_of_its_window(windows: list[int | None]) -> None:
    groups = LayerGroups.of(windows)
    assert len(set(groups.places)) == len(windows)
    for layer, (group, place) in enumerate(groups.places):
        assert groups.layers[group][place] == layer
        assert groups.windows[group] == windows[layer]
        assert place < groups.page_layers
    for window in set(windows):
        sizes = [len(g) for g, w in zip(groups.layers, groups.windows, strict=True) if w == window]
        assert sizes[:-1] == [groups.page_layers] * (len(sizes) - 1), "only the last group of a window has gaps"


def test_full_attention_comes_first_and_sets_the_size() -> None:
    gemma3 = LayerGroups.of(([512] * 5 + [None]) * 4 + [512] * 2)
    assert gemma3.layers[0] == (5, 11, 17, 23)
    assert gemma3.windows == (None, *[512] * 6)
    assert gemma3.layers[-1] == (24, 25)
    gpt_oss = LayerGroups.of([128, None] * 12)
    assert [len(layers) for layers in gpt_oss.layers] == [12, 12]


def test_layers_with_one_window_are_one_group() -> None:
    assert LayerGroups.of([4096] * 32) == LayerGroups((4096,), (tuple(range(32)),))
    assert not LayerGroups.of([4096] * 32).is_divided


@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 9), st.integers(1, 30), st.lists(st.integers(1, 30)))
def test_no_steps_hold_more_blocks_than_the_bound(
    num_tokens: int, window: int, block_tokens: int, step_tokens: int, steps: list[int]
) -> None:
    """Blocks from the first that is read after the last full block, up to the end of the step."""
    computed, most = 0, 0
    for size in (*steps, *[step_tokens] * num_tokens):
        end = min(num_tokens, computed + min(size, step_tokens))
        boundary = computed // block_tokens * block_tokens
        most = max(most, -(-end // block_tokens) - first_block_read(boundary, window, block_tokens))
        computed = end
    assert most <= max_blocks(window, block_tokens=block_tokens, step_tokens=step_tokens)


@pytest.mark.parametrize(
    ("windows", "context", "is_divided"),
    [
        ([8, None] * 2, 4000, True),
        ([8, None] * 2, 16, False),  # a window of half the context: two groups hold as much as one
        ([None] * 4, 4000, False),
        ([None] * 3 + [8], 4000, True),
        ([None] * 3 + [8], 256, False),  # of the three places in pages of the second group, one is used
        ([8] * 3 + [None], 4000, True),
    ],
)
def test_layers_are_divided_where_a_long_request_takes_less_memory(
    windows: list[int | None], context: int, is_divided: bool
) -> None:
    config = replace(tiny.config(), num_layers=4, windows=tuple(windows))
    groups = choose_groups(config, context_tokens=context, block_tokens=16, step_tokens=64)
    assert groups.is_divided == is_divided
    pair = (groups, LayerGroups.single(4))
    sizes = [g.page_layers * g.max_pages(context, block_tokens=16, step_tokens=64) for g in pair]
    assert (sizes[0] < sizes[1]) == is_divided
