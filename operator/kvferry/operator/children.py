"""Applies a pool's objects, each only when it differs from what was applied last or somebody touched it since.

An object of the same name that is not the pool's is never taken over: it would go when the pool goes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from kvferry.operator.api import ApiRefusal, KubeApi
from kvferry.operator.facts import owner_of
from kvferry.operator.spec import Json

_POOL = "InferencePool"
Place = tuple[str, str]
"""Kind and name."""


class NameTaken(ApiRefusal):
    """An object of that name exists and is not the pool's."""

    def __init__(self, kind: str, name: str, *, leaving: bool) -> None:
        why = "is being deleted" if leaving else "exists and is not this pool's; rename it, or the pool"
        super().__init__(409, "NameTaken", f"a {kind} called {name} {why}")


class Children:
    """One pool's objects as this operator left them. Not shared between threads."""

    def __init__(self, api: KubeApi, applied: Callable[[Json], None] = lambda body: None) -> None:
        """
        Args:
            applied: told what each write made.
        """
        self._api = api
        self._applied = applied
        self._left: dict[Place, tuple[bytes, str]] = {}
        self._ours: set[Place] = set()
        self._unwanted: set[Place] = set()

    def forget(self) -> None:
        """Apply everything anew next time."""
        self._left.clear()
        self._ours.clear()
        self._unwanted.clear()

    def forget_kind(self, kind: str) -> None:
        """The cluster does not know this kind any more, and with it went its objects."""
        for place in [place for place in self._left if place[0] == kind]:
            del self._left[place]
        self._unwanted = {place for place in self._unwanted if place[0] != kind}

    def apply(self, manifest: Mapping[str, Any], live: str | None = None) -> bool:
        """Apply `manifest` unless that changes nothing; whether it was done.

        Args:
            live: version of the object as the watch shows it now; empty: the watch shows none; `None`: not watched.

        Raises:
            NameTaken: there is another's object of that name.
            ApiRefusal: it was refused.
        """
        place = (str(manifest["kind"]), str(manifest["metadata"]["name"]))
        digest = blake3(msgspec.json.encode(manifest, order="sorted")).digest(16)
        left = self._left.get(place)
        if left is not None and left[0] == digest and (live is None or live == left[1]):
            return False
        if place not in self._ours or live == "":
            self._check_owner(manifest)
        answer = self._api.apply(manifest)
        self._left[place] = (digest, version_of(answer))
        self._ours.add(place)
        self._unwanted.discard(place)
        self._applied(answer)
        return True

    def remove(self, api_version: str, kind: str, namespace: str, name: str, owner: str) -> bool:
        """Delete an object that is not wanted, if it is `owner`'s, once; whether it was asked for."""
        place = (kind, name)
        if place in self._unwanted:
            return False
        found = self._api.get(api_version, kind, namespace, name)
        if found is not None and owner_of(found) == owner:
            self._api.delete(api_version, kind, namespace, name, found["metadata"]["uid"])
        self._unwanted.add(place)
        self._left.pop(place, None)
        return True

    def _check_owner(self, manifest: Mapping[str, Any]) -> None:
        meta = manifest["metadata"]
        found = self._api.get(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])
        if found is not None and (owner_of(found) != owner_of(manifest) or "deletionTimestamp" in found["metadata"]):
            # Of an earlier pool of this name, which the garbage collector has not come to yet.
            owners = {
                owner["name"] for owner in found["metadata"].get("ownerReferences") or () if owner["kind"] == _POOL
            }
            pool = manifest["metadata"]["ownerReferences"][0]["name"]
            leaving = "deletionTimestamp" in found["metadata"] or pool in owners
            raise NameTaken(manifest["kind"], meta["name"], leaving=leaving)


def version_of(body: Json) -> str:
    """What changes when somebody changes the object: its generation, or where it has none its resourceVersion."""
    meta = body.get("metadata") or {}
    return str(meta.get("generation") or meta.get("resourceVersion") or "")
