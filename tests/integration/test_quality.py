"""Accuracy of data types and weight formats on real text, within bounds; `tests/bench/bench_quality.py` measures it."""

import importlib.util
from pathlib import Path

from kvferry.kernels import compiled
from kvferry.model.source import ModelSource

BENCH = Path(__file__).parents[1] / "bench" / "bench_quality.py"
MEAN_KL = 2e-3
"""Four times the measured value; torch in bfloat16 exceeds it."""
FAST_KL = 2e-2


def test_data_types_and_formats_are_near_float32(smollm: ModelSource) -> None:
    spec = importlib.util.spec_from_file_location("bench_quality", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    text = (BENCH.parent / "texts" / "public_domain.txt").read_text()
    tokens = smollm.tokenizer.encode(text, add_special=True)[:120]
    exact = bench.log_probabilities(smollm, tokens, bench.REFERENCE)
    for level in compiled.levels():
        for numerics, most, same in (("exact", MEAN_KL, 0.96), ("fast", FAST_KL, 0.9)):
            found = bench.log_probabilities(smollm, tokens, (f"compiled-{level}", "bfloat16", "shipped", numerics))
            assert float((exact.exp() * (exact - found)).sum(-1).mean()) < most
            assert float((exact.argmax(-1) == found.argmax(-1)).double().mean()) > same
