"""Merge of a user's pod template over the operator's template: maps are merged, lists of named items are merged by
name, other lists are replaced."""

from collections.abc import Mapping, Sequence
from typing import Any

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Merge key by list field, as in a strategic merge patch of a Pod."""
_APPENDED = frozenset({"tolerations"})


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into a copy of `base`; a null in `over` removes the field."""
    merged = dict(base)
    for name, value in over.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(name, merged.get(name), value)
    return merged


def _merge(name: str, base: Any, over: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return overlay(base, over)
    if isinstance(base, list) and isinstance(over, list):
        if name in _APPENDED:
            return [*base, *(entry for entry in over if entry not in base)]
        if name in _KEYS:
            return _merge_by_key(base, over, _KEYS[name])
    return over


def _merge_by_key(base: Sequence[Any], over: Sequence[Any], key: str) -> list[Any]:
    merged = list(base)
    places = {entry[key]: i for i, entry in enumerate(merged) if isinstance(entry, Mapping) and key in entry}
    for entry in over:
        place = places.get(entry[key]) if isinstance(entry, Mapping) and key in entry else None
        if place is None:
            merged.append(entry)
        else:
            merged[place] = overlay(merged[place], entry)
    return merged
