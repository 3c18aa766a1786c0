"""Applies a pool's objects, each only when it differs from what was applied last or somebody touched it since."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from kvferry.operator.api import KubeApi
from kvferry.operator.spec import Json

Place = tuple[str, str]
"""Kind and name."""


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
        self._unwanted: set[Place] = set()

    def forget(self) -> None:
        """Apply everything anew next time."""
        self._left.clear()
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
            ApiRefusal: it was refused.
        """
        place = (str(manifest["kind"]), str(manifest["metadata"]["name"]))
        digest = blake3(msgspec.json.encode(manifest, order="sorted")).digest(16)
        left = self._left.get(place)
        if left is not None and left[0] == digest and (live is None or live == left[1]):
            return False
        answer = self._api.apply(manifest)
        self._left[place] = (digest, version_of(answer))
        self._unwanted.discard(place)
        self._applied(answer)
        return True

    def remove(self, api_version: str, kind: str, namespace: str, name: str) -> bool:
        """Delete an object that is not wanted, once; whether it was asked for."""
        place = (kind, name)
        if place in self._unwanted:
            return False
        self._api.delete(api_version, kind, namespace, name)
        self._unwanted.add(place)
        self._left.pop(place, None)
        return True


def version_of(body: Json) -> str:
    """What changes when somebody changes the object: its generation, or where it has none its resourceVersion."""
    meta = body.get("metadata") or {}
    return str(meta.get("generation") or meta.get("resourceVersion") or "")
