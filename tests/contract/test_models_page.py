"""docs/models.md lists the families that exist, and what serves them."""

import re
from pathlib import Path

from kvferry.engine.models.build import COMPILED_FEATURES
from kvferry.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from kvferry.model.families.gpt_oss import GPT_OSS
from kvferry.model.families.mixtures import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from kvferry.model.families.registry import FAMILIES, GGUF_ARCHITECTURES
from kvferry.model.features import FEATURES

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)]


def test_the_table_has_a_row_for_each_family() -> None:
    told = [(name.strip("`"), models, kind.strip("`")) for name, models, kind, *_ in ROWS]
    assert told == [(family.name, family.title, family.architecture) for family in FAMILIES.values()]


def test_the_table_says_what_serves_a_family() -> None:
    assert set(FEATURES) - set(COMPILED_FEATURES) <= {"experts", "latent"}
    for name, _, _, *cells in ROWS:
        has_experts = name.strip("`") in {MIXTRAL.name, QWEN2_MOE.name, QWEN3_MOE.name, GPT_OSS.name}
        is_latent = name.strip("`") in {DEEPSEEK_V2.name, DEEPSEEK_V3.name}
        lacking = {"latent": is_latent, "experts": has_experts or is_latent}
        compiled = "refused" if any(lacking[f] for f in lacking if f not in COMPILED_FEATURES) else "works"
        gguf = "works" if name.strip("`") in GGUF_ARCHITECTURES else "refused"
        assert cells == [compiled, "works", "refused" if has_experts or is_latent else "works", gguf]
