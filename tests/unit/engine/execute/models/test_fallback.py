"""Kernel families that lack a feature of the model are not chosen by `auto`, and are refused by name when selected."""

from dataclasses import replace

import pytest

from kvferry.core.errors import UsageError
from kvferry.engine.execute.models import build
from kvferry.engine.execute.models.build import build_model, resolve_kernels
from kvferry.model import tiny
from kvferry.weights.config import Experts
from kvferry.weights.features import FEATURES

CAPPED = replace(tiny.config(), attention_soft_cap=20.0, windows=(8, None))


def test_a_lacking_feature_falls_back_to_torch_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_kernels("auto", CAPPED, "float32").startswith("compiled")
    monkeypatch.setattr(build, "COMPILED_FEATURES", frozenset(FEATURES) - {"windows", "attention_soft_cap"})
    model = build_model(CAPPED, tiny.TinyTensors(CAPPED), dtype="float32")
    assert model.kernels == "torch"
    (line,) = [r.getMessage() for r in caplog.records if r.name == build.__name__]
    assert line == (
        "falling back to torch kernels, several times slower: they do not implement windows, attention_soft_cap of the"
        " model family llama"
    )
    assert resolve_kernels("auto", tiny.config(), "float32").startswith("compiled")
    with pytest.raises(UsageError, match="compiled kernels cannot run here: they do not implement windows, attention"):
        resolve_kernels("compiled", CAPPED, "float32")


def test_heads_of_an_odd_size_fall_back() -> None:
    odd = replace(tiny.config(), head_dim=24)
    assert resolve_kernels("auto", odd, "float32") == "torch"
    with pytest.raises(UsageError, match="head_dim 24 is not a multiple of 16"):
        resolve_kernels("compiled-avx2", odd, "float32")


def test_models_with_experts_take_adapters() -> None:
    config = replace(tiny.config(), experts=Experts(4, 2, 16, renormalizes=True))
    for kernels in ("torch", "compiled"):
        model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels=kernels)
        assert model.why_no_adapters is None
