"""docs/models.md lists the existing families, and the kernels that serve them."""

import re
from pathlib import Path

from kvferry.engine.execute.models.build import COMPILED_FEATURES
from kvferry.weights.checkpoints.gguf.architectures import ARCHITECTURES
from kvferry.weights.families.registry import FAMILIES
from kvferry.weights.features import FEATURES

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)]


def test_the_table_has_a_row_for_each_family() -> None:
    listed = [(name.strip("`"), models, kind.strip("`")) for name, models, kind, *_ in ROWS]
    assert listed == [(family.name, family.title, family.architecture) for family in FAMILIES.values()]


def test_the_table_names_the_kernels_that_serve_a_family() -> None:
    assert set(FEATURES) == set(COMPILED_FEATURES)
    for name, _, _, *cells in ROWS:
        gguf = FAMILIES[name.strip("`")].gguf
        assert gguf in ARCHITECTURES
        assert cells[:3] == ["works"] * 3  # test_family_table tests the cells between
        assert cells[-1] == f"`{gguf}`"
