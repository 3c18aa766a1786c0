"""Ranges of numeric engine settings, equal in the Python API and on the command line."""

from dataclasses import fields

import pytest

from kvferry.cli.engine_options import ADAPTERS, ENGINE
from kvferry.core.errors import UsageError
from kvferry.engine import LLM
from kvferry.engine.schedule.plan.step_budget import SchedulerLimits
from kvferry.engine.schedule.ranges import RANGES
from kvferry.engine.settings import EngineSettings

LIMITS = {field.name for field in fields(SchedulerLimits)}


@pytest.mark.parametrize("field", RANGES)
@pytest.mark.parametrize("value", [-1, True, 1.0, "1", 1 << 60], ids=repr)
def test_a_number_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{field} must be a whole number from .*, not ") as caught:
        SchedulerLimits(**{field: value}) if field in LIMITS else EngineSettings("m", **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "0.5"], ids=repr)
def test_a_share_out_of_range_is_named(value: object) -> None:
    with pytest.raises(UsageError, match="reserve_share must be from 0 to 1"):
        SchedulerLimits(reserve_share=value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gpu_memory_share must be above 0 and at most 1"):
        EngineSettings("m", gpu_memory_share=value)  # type: ignore[arg-type]


def test_every_whole_number_has_a_range() -> None:
    numbers = {
        field.name for kind in (EngineSettings, SchedulerLimits) for field in fields(kind) if field.type in ("int", int)
    }
    assert numbers - {"seed"} == set(RANGES)


@pytest.mark.parametrize("setting", [s for s in (*ENGINE, *ADAPTERS) if s.name in RANGES], ids=lambda s: s.name)
def test_the_command_line_accepts_the_same_range(setting) -> None:
    least, most = RANGES[setting.name]
    assert setting.parse(str(max(1, least))) == max(1, least)
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError):  # noqa: PT011  any text
            setting.parse(str(value))


def test_llm_refuses_numbers_before_it_loads_a_model() -> None:
    with pytest.raises(UsageError, match="threads must be a whole number from 0 to 1024, not -1"):
        LLM("no-such-model", threads=-1)
    with pytest.raises(UsageError, match=r"must be at most this process's memory limit of .* bytes"):
        LLM("tiny", kv_bytes=1 << 49)
