"""Converts command-line settings to engine settings, for all commands that create an engine."""

from dataclasses import fields

from kvferry.cli.fetching import fetch_first
from kvferry.cli.options import Values
from kvferry.core.errors import UsageError, shortened
from kvferry.core.settings.engine import EngineSettings, SchedulerLimits


def engine_settings(values: Values, **changes: object) -> EngineSettings:
    """Convert a command's settings to engine settings; `changes` override them. Fetches the model if it is one of the
    hub.

    Settings and fields have the same names. A field without a setting in this command keeps its default.

    Raises:
        KvferryError: the model cannot be fetched, or a setting is invalid.
    """
    names = {one.name for kind in (EngineSettings, SchedulerLimits) for one in fields(kind)} - {"model"}
    found = {name: values[name] for name in values.resolved if name in names}
    if "adapter" in values.resolved:
        found["adapters"] = tuple(_adapter(str(spec)) for spec in values["adapter"])
    return EngineSettings.of(fetch_first(values), **{**found, **changes})


def _adapter(spec: str) -> tuple[str, str]:
    """Split NAME=PATH.

    Raises:
        UsageError: a part is missing.
    """
    name, _, path = spec.partition("=")
    if not name or not path:
        raise UsageError(f"adapter {shortened(spec)!r} must be NAME=PATH", field="adapter")
    return name, path
