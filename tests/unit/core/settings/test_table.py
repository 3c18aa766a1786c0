"""The one table of settings: flags, Python and configurations agree with it, and no list of names stands twice."""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest

from kvferry.cli.commands import gateway, worker
from kvferry.cli.options import REGISTRIES, bound
from kvferry.core.errors import UsageError
from kvferry.core.settings import processes
from kvferry.core.settings.engine import (
    BACKENDS,
    LEVELS,
    LOAD_POLICIES,
    MAX_RANK,
    MAX_SLOTS,
    SCHEDULING_POLICIES,
    EngineSettings,
    SchedulerLimits,
)
from kvferry.core.settings.setting import Setting, check_settings, number, settings_of
from kvferry.engine import LLM, AsyncLLM
from kvferry.engine.schedule.policies.policy import POLICIES as SCHEDULERS
from kvferry.gateway.decide.config import POLICIES, GatewayConfig
from kvferry.kernels import backends, compiled
from kvferry.kv import registry
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.text.answers.registry import CALL_PARSERS, REASONING_PARSERS
from kvferry.weights.adapters import adapter_config
from kvferry.workers.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[4]
ENGINE = {setting.name: setting for kind in (EngineSettings, SchedulerLimits) for setting in settings_of(kind)}
KINDS = {name: kind for kind in (EngineSettings, SchedulerLimits) for name in (one.name for one in fields(kind))}


def made(name: str, value: object) -> Any:
    return SchedulerLimits(**{name: value}) if KINDS[name] is SchedulerLimits else EngineSettings("m", **{name: value})


@pytest.mark.parametrize("name", [name for name in ENGINE if name != "class_weights"])  # needs scheduling=weighted
def test_python_and_the_command_line_accept_the_same_values(name: str) -> None:
    setting = ENGINE[name]
    texts = ["-1", "0", "1", "2", "63", "64", "1024", "1025", "4096", "4097", "65536", "1048577", "0.5", "1.5", "nan"]
    texts += [
        "auto",
        "on",
        "cpu",
        "cuda:1",
        "int8",
        "fcfs",
        "price",
        "always",
        "512MiB",
        "no such value",
        *setting.choices,
    ]
    hints = get_type_hints(KINDS[name])
    for text in texts:
        try:
            value = setting.parse(text)
            accepted = not setting.choices or value in setting.choices
        except ValueError:
            kind = hints[name]
            try:
                value, accepted = kind(text), False
            except ValueError:
                continue  # text that is no number is no value in Python either
        if accepted:
            made(name, value)
        else:
            with pytest.raises(UsageError, match=rf"^{name} must be ") as caught:
                made(name, value)
            assert caught.value.field == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("threads", "max_num_seqs", "kv_memory") for value in (True, 1.0, None, 1 << 60)],
        *[("pin_share", value) for value in (-0.1, 1.1, float("nan"), True, "0.5")],
        ("gpu_memory_utilization", 0),
        *[("window_pages", value) for value in ("x", None, 1)],
        ("cuda_graphs", "x"),
        ("kv_memory", "many"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"^{field} must be .*, not ") as caught:
        made(field, value)
    assert caught.value.field == field


@pytest.mark.parametrize("make", [LLM, AsyncLLM], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": -1}, "threads must be a whole number from 0 to 1024, not -1"),
        ({"window_pages": "x"}, "window_pages must be one of auto, keep, release, not 'x'"),
        ({"max_num_seq": 4}, "unknown setting 'max_num_seq'; did you mean max_num_seqs?"),
        ({"kv_memory": 1 << 49}, r"must be at most this process's memory limit of \d+MiB, not 536870912MiB"),
    ],
)
def test_settings_are_checked_before_a_model_is_opened(make: Any, settings: dict[str, object], message: str) -> None:
    name = "tiny" if "kv_memory" in settings else "no-such-model"
    with pytest.raises(UsageError, match=message):
        make(name, **settings)


def test_every_setting_of_an_engine_is_an_argument_of_both_apis(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[EngineSettings] = []
    monkeypatch.setattr(LLM, "_load", lambda self, settings: found.append(settings))
    for name, setting in ENGINE.items():
        LLM("tiny", **{name: setting.default})
    LLM("tiny", max_num_seqs=3, limits=SchedulerLimits(token_budget=77), adapters={"a": "/folder"}, kv_memory="4MiB")
    assert found[-1].limits == SchedulerLimits(token_budget=77, max_num_seqs=3)
    assert found[-1].adapters == (("a", "/folder"),)
    assert found[-1].kv_memory == 4 << 20


def flags_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def test_a_new_setting_is_one_entry() -> None:
    """A setting that is added to the table has a flag, a check in Python and a default, with no other line."""

    @dataclass(frozen=True, slots=True)
    class More(EngineSettings):
        lookahead: int = number(3, "Steps to look ahead.", low=0, high=9)

    (setting,) = [one for one in settings_of(More) if one.name == "lookahead"]
    assert (setting.flag, setting.variable, setting.default) == ("--lookahead", "KVFERRY_LOOKAHEAD", 3)
    assert bound(setting).parse("4") == 4
    with pytest.raises(UsageError, match="lookahead must be a whole number from 0 to 9, not 10"):
        More("m", lookahead=10)
    with pytest.raises(UsageError, match="lookahead"):
        check_settings(replace(More("m"), lookahead=10))


def test_every_entry_of_a_process_is_a_flag() -> None:
    for table, command in ((processes.WORKER, worker.command), (processes.GATEWAY, gateway.command)):
        assert {one.flag for one in table if not one.is_secret} <= flags_of(command)


def test_names_that_other_packages_register_are_those_of_the_table() -> None:
    assert set(SCHEDULING_POLICIES) == set(SCHEDULERS)
    assert set(LOAD_POLICIES) == set(LoadPolicy)
    assert set(BACKENDS) == set(backends.BACKENDS)
    assert set(compiled.levels()) <= set(LEVELS)
    assert MAX_RANK == adapter_config.MAX_RANK
    assert MAX_SLOTS == 1024
    used = {one.registry for table in (processes.WORKER, processes.GATEWAY, processes.UP) for one in table}
    assert used - {""} == set(REGISTRIES)
    assert REGISTRIES["connectors"] == tuple(registry.names())


def test_a_connector_that_is_registered_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._MODULES, "mine", "kvferry.kv.connectors.memory")
    monkeypatch.setitem(REGISTRIES, "connectors", tuple(registry.names()))
    assert "mine" in bound(processes.CONNECTOR).choices


LISTS = {
    "connectors": set(registry.names()),
    "routing policies": set(POLICIES),
    "scheduling policies": set(SCHEDULING_POLICIES),
    "call parsers": set(CALL_PARSERS),
    "reasoning parsers": set(REASONING_PARSERS),
    "tiers": {"dram", "disk", "redis"},
}
ALLOWED = {"scheduling policies": 2, "routing policies": 1, "connectors": 1, "tiers": 1}
"""Number of places that hold the whole list: its registry, and for scheduling policies also the table."""


def literals(path: Path) -> Iterator[set[str]]:
    """Yield the strings of each literal collection of a module, of a dict its keys, and the arguments of `Literal`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        elements: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            elements = list(node.elts)
        elif isinstance(node, ast.Dict):
            elements = list(node.keys)
        yield {item.value for item in elements if isinstance(item, ast.Constant) and isinstance(item.value, str)}


@pytest.mark.parametrize("name", LISTS)
def test_no_list_of_names_stands_twice(name: str) -> None:
    files = [
        path for root in ("services", "operator") for path in (ROOT / root).rglob("*.py") if "_pb2" not in path.name
    ]
    found = [path for path in files for strings in literals(path) if LISTS[name] <= strings]
    assert len(found) <= ALLOWED.get(name, 1), found


def defaults(kind: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the names and defaults of the fields of a configuration, also of nested ones."""
    hints = get_type_hints(kind, localns={"CertificateFiles": object})
    for one in fields(kind):
        if is_dataclass(hints[one.name]) and isinstance(hints[one.name], type):
            yield from defaults(hints[one.name], f"{prefix}{one.name}.")
        elif one.default is not MISSING:
            yield one.name, one.default


@pytest.mark.parametrize(
    ("kind", "table"), [(WorkerConfig, processes.WORKER), (GatewayConfig, processes.GATEWAY)], ids=["worker", "gateway"]
)
def test_configurations_have_the_defaults_of_the_table(kind: type, table: tuple[Setting, ...]) -> None:
    settings = {one.name: one.default for one in table if not one.is_secret}
    differing = {
        name: (default, settings[name])
        for name, default in defaults(kind)
        if name in settings and (default or "") != (settings[name] or "")
    }
    assert {name: pair for name, pair in differing.items() if name not in _MADE_BY_THE_COMMAND} == {}


_MADE_BY_THE_COMMAND = {
    "model",
    "http",
    "grpc",
    "admin",
    "tls",
    "role",
    "listen",
    "pool",
    "traces",
    "prefill",
    "decode",
    "both",
}
"""Fields whose values the command makes from several settings."""
