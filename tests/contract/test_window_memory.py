"""The table of KV memory in docs/models.md is what the allocator holds for a request of 32,768 tokens."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvferry.core.settings.engine import EngineSettings, SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.kv.pages.layer_groups import LayerGroups, choose_groups
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text("utf-8")
TOKENS, MEMORY = 32_768, 16 << 30
BLOCK = EngineSettings("").block_tokens
CHUNK = SchedulerLimits().step_tokens


@dataclass(frozen=True)
class Shape:
    """Dimensions that determine the KV of a published model."""

    name: str
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def config(self) -> ModelConfig:
        return replace(
            tiny.config(),
            num_layers=len(self.windows),
            num_heads=self.kv_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            windows=self.windows,
        )


def gemma3(name: str, layers: int, kv_heads: int, head_dim: int, window: int) -> Shape:
    windows = tuple(None if layer % 6 == 5 else window for layer in range(layers))
    return Shape(f"Gemma 3 {name}", kv_heads, head_dim, windows)


SHAPES = [
    gemma3("1b", 26, 1, 256, 512),
    gemma3("4b", 34, 4, 256, 1024),
    gemma3("12b", 48, 8, 256, 1024),
    gemma3("27b", 62, 16, 128, 1024),
    Shape("gpt-oss 20b", 8, 64, (128, None) * 12),
    Shape("gpt-oss 120b", 8, 64, (128, None) * 18),
]


def most_held(allocator: Allocator) -> int | None:
    """Compute a prompt in chunks in a new table; return the largest number of pages that were held, or `None` if the
    pages do not suffice."""
    table, before, most = BlockTable(), allocator.pool.num_held, 0
    for computed in range(0, TOKENS, CHUNK):
        if not allocator.grow(table, num_tokens=computed + CHUNK):
            allocator.free(table)
            return None
        most = max(most, allocator.pool.num_held - before)
        allocator.release_passed(table, computed + CHUNK)
    return most


def measured(shape: Shape, groups: LayerGroups) -> tuple[int, int]:
    """Return the bytes of a request, and how many such requests fit into the memory beside each other."""
    layout = KvLayout.of(shape.config, block_tokens=BLOCK, dtype="bfloat16", releases_windows=groups.windows != (None,))
    allocator = Allocator.create(
        MEMORY // layout.block_bytes, block_tokens=BLOCK, windows=groups.windows, step_tokens=CHUNK
    )
    first = most_held(allocator)
    assert first is not None, "not even one request fits"
    assert first <= allocator.needs.pages_for(TOKENS)
    count = 1
    while most_held(allocator) is not None:
        count += 1
    allocator.check_integrity()
    return first * layout.block_bytes, count


def row(shape: Shape) -> str:
    config = shape.config
    divided = choose_groups(config, context_tokens=TOKENS, block_tokens=BLOCK, step_tokens=CHUNK)
    assert divided.is_divided
    full = shape.windows.count(None)
    cells = [shape.name, f"{full} full, {len(shape.windows) - full} of {min(w for w in shape.windows if w)}"]
    both = [measured(shape, groups) for groups in (LayerGroups.single(config.num_layers), divided)]
    cells += [f"{size / (1 << 20):,.0f} MiB" for size, _ in both] + [str(count) for _, count in both]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_row_of_a_model_is_what_the_allocator_holds(shape: Shape) -> None:
    assert row(shape) in PAGE
