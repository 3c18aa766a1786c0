"""A measured data type is recorded where possible, and measured again where not."""

import json
from pathlib import Path

import pytest

from kvferry.engine.execute.dtypes import dtype_record
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig

MEASURED: list[str] = []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    MEASURED.clear()

    def choose(wanted: str, _: ModelConfig, *, kernels: str) -> str:
        assert kernels == "torch"
        MEASURED.append(wanted)
        return {"auto": "bfloat16"}.get(wanted, wanted)

    monkeypatch.setattr(dtype_record, "choose_dtype", choose)
    monkeypatch.setattr(dtype_record, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def load() -> str:
    return dtype_record.recorded_dtype("auto", tiny.config(), kernels="torch")


def test_the_data_type_is_measured_once(cache: Path) -> None:
    assert [load(), load()] == ["bfloat16", "bfloat16"]
    assert MEASURED == ["auto", "bfloat16", "bfloat16"]


def test_without_a_writable_cache_the_type_is_measured(cache: Path) -> None:
    cache.write_text("not a folder")
    assert load() == "bfloat16"
    assert MEASURED == ["auto"]


def test_a_recorded_choice_of_a_user_is_used(cache: Path) -> None:
    load()
    record = cache / "dtype.json"
    record.write_text(json.dumps(dict.fromkeys(json.loads(record.read_text()), "float16")))
    (cache / "dtype.lock").unlink()
    (cache / "dtype.lock").mkdir()  # root could write to a file of any mode
    assert load() == "float16"
