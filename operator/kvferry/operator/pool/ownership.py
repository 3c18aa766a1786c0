"""Ownership of Kubernetes objects: their controller, and the fields that the operator has applied."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from kvferry.operator.pool import names


def owner_of(body: Mapping[str, Any]) -> str:
    """Return the uid of the controller that owns an object; empty if there is none."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def is_orphan(body: Mapping[str, Any]) -> bool:
    """Return whether an object has fields of the operator but no controller, since its owner reference was removed."""
    return not owner_of(body) and any(True for _ in _own_entries(body))


def version_of(body: Mapping[str, Any]) -> str:
    """Return the version of the fields that the operator has applied to an object.

    The API server keeps the applied fields in `metadata.managedFields`: a field that a different manager changes leaves
    the operator's entry, and so does a field that is removed. The version therefore changes if a field of the operator
    is changed or removed, and not if a controller writes its own fields or the status. An object without managed fields
    has its generation as version, or its resourceVersion if it has no generation.
    """
    meta = body.get("metadata") or {}
    if not meta.get("managedFields"):
        return str(meta.get("generation") or meta.get("resourceVersion") or "")
    applied = [
        (entry.get("time"), entry.get("fieldsV1"))
        for entry in _own_entries(body)
        if entry.get("operation") == "Apply" and not entry.get("subresource")
    ]
    return blake3(msgspec.json.encode(applied, order="sorted")).hexdigest(8)


def order_of(body: Mapping[str, Any]) -> int:
    """Return the resourceVersion as a number, which increases with every change of an object; 0 if there is none."""
    found = str((body.get("metadata") or {}).get("resourceVersion") or "")
    return int(found) if found.isdecimal() else 0


def entry_removal(body: Mapping[str, Any], managers: Container[str]) -> list[dict[str, Any]]:
    """Return the JSON patch (RFC 6902) that removes the entries of field managers from `metadata.managedFields`, so
    that they own no fields of the object; empty if there are none. Entries of the status are kept.

    Each removal follows a test of the entry's manager, so that the patch is rejected if the entries were reordered.
    """
    patch: list[dict[str, Any]] = []
    for index, entry in reversed(list(enumerate(body["metadata"].get("managedFields") or ()))):
        if entry.get("manager") in managers and entry.get("subresource") != "status":
            path = f"/metadata/managedFields/{index}"
            patch.append({"op": "test", "path": f"{path}/manager", "value": entry["manager"]})
            patch.append({"op": "remove", "path": path})
    return patch


def _own_entries(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for entry in body["metadata"].get("managedFields") or ():
        if entry.get("manager") == names.FIELD_MANAGER:
            yield entry
