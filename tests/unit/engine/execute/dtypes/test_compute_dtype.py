"""Data type `auto` selects the faster type; other names select themselves."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.engine.execute.dtypes import faster_dtype
from kvferry.engine.execute.dtypes.compute_dtype import choose_dtype
from kvferry.model import tiny


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8", "fp8"])
def test_a_named_format_is_taken(name: str) -> None:
    assert choose_dtype(name, tiny.config()) == name


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int3'; expected one of auto, float32, bfloat16"):
        choose_dtype("int3", tiny.config())


@pytest.mark.parametrize(("float32", "bfloat16"), [(1.0, 2.0), (2.0, 1.0)])
def test_auto_selects_the_faster_type(monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float) -> None:
    cost = {"float32": float32, "bfloat16": bfloat16}
    monkeypatch.setattr(
        faster_dtype, "_seconds", lambda config, ops, dtype, clock: cost[str(dtype).removeprefix("torch.")]
    )
    assert choose_dtype("auto", tiny.config(), kernels="torch") == min(cost, key=lambda dtype: cost[dtype])


def test_auto_is_bfloat16_without_measuring_where_the_compiled_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster_dtype, "_seconds", None)
    assert choose_dtype("auto", tiny.config(), kernels="compiled-portable") == "bfloat16"


def test_auto_really_measures() -> None:
    assert choose_dtype("auto", tiny.config(), kernels="torch") in ("float32", "bfloat16")
