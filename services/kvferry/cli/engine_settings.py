"""Converts command-line settings to engine settings, for all commands that create an engine."""

from dataclasses import fields
from typing import TYPE_CHECKING

from kvferry.cli.options import Values
from kvferry.core.errors import UsageError, shortened

if TYPE_CHECKING:
    from kvferry.engine.settings import EngineSettings

_FIELD_OF = {"kv_memory": "kv_bytes", "adapter_memory": "adapter_bytes", "adapter": "adapters"}
"""Engine field by setting, for those with different names."""


def engine_settings(values: Values, **changes: object) -> "EngineSettings":
    """Convert a command's settings to engine settings; `changes` override them.

    Settings and fields have the same names. A field without a setting in this command keeps its default.
    """
    # Imported here: these load the engine, which would delay `--help` and errors in flags.
    from kvferry.engine.schedule.plan.step_budget import SchedulerLimits
    from kvferry.engine.settings import EngineSettings
    from kvferry.kv.pricing.price import LoadPolicy

    def taken(kind: type) -> dict[str, object]:
        names = {f.name for f in fields(kind)}
        return {field: values[name] for name in values.resolved if (field := _FIELD_OF.get(name, name)) in names}

    found = taken(EngineSettings)
    if "load_policy" in found:
        found["load_policy"] = LoadPolicy(str(found["load_policy"]))
    if "adapters" in found:
        found["adapters"] = tuple(_adapter(str(spec)) for spec in values["adapter"])
    found["limits"] = SchedulerLimits(**taken(SchedulerLimits))  # type: ignore[arg-type]
    return EngineSettings(**{**found, **changes})  # type: ignore[arg-type]


def _adapter(spec: str) -> tuple[str, str]:
    """Split NAME=PATH.

    Raises:
        UsageError: a part is missing.
    """
    name, _, path = spec.partition("=")
    if not name or not path:
        raise UsageError(f"adapter {shortened(spec)!r} must be NAME=PATH", field="adapter")
    return name, path
