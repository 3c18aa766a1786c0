"""Checks of the settings of adapters, before any file is read."""

from kvferry.core.errors import UsageError, shortened
from kvferry.core.ids import MAX_ADAPTER_NAME_CHARS
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine.schedule.adapters.adapter_store import MAX_ADAPTERS


def check_adapter_settings(settings: EngineSettings, model: str) -> None:
    """Check the settings of adapters.

    Args:
        settings: the settings.
        model: name of the model.

    Raises:
        UsageError: two adapters have the same name, a name is not valid, or there are no slots.
    """
    if settings.adapters and not settings.adapter_slots:
        raise UsageError("adapter_slots is 0, but adapters need slots; set it to at least 1", field="adapter_slots")
    if len(settings.adapters) > MAX_ADAPTERS:
        raise UsageError(
            f"{len(settings.adapters)} adapters are set; at most {MAX_ADAPTERS} are accepted", field="adapter"
        )
    names = [name for name, _ in settings.adapters]
    for name in names:
        check_adapter_name(name, model)
        if names.count(name) > 1:
            raise UsageError(f"two adapters have the name {name!r}; use unique names", field="adapter")


def check_adapter_name(name: str, model: str) -> None:
    """Check the name of an adapter, which requests use as their model.

    Args:
        name: name of the adapter.
        model: name of the base model.

    Raises:
        UsageError: the name is empty, too long, not printable, or the model's name.
    """
    if not name or len(name) > MAX_ADAPTER_NAME_CHARS or not name.isprintable():
        raise UsageError(
            f"the adapter's name {shortened(name)!r} is not valid; use 1 to {MAX_ADAPTER_NAME_CHARS} printable "
            "characters",
            field="lora_name",
        )
    if name == model:
        raise UsageError(f"the adapter's name {name!r} is the model's name; use another name", field="lora_name")
