"""Events of a pool: one when a condition's reason changes, none when it stays. Best effort; the status is the truth."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.core.errors import KvferryError
from kvferry.operator import names
from kvferry.operator.api import KubeApi
from kvferry.operator.names import Condition
from kvferry.operator.spec import Json, Pool

_log = logging.getLogger(__name__)

_WARNS: Mapping[Condition, str] = {
    Condition.PROGRESSING: "",
    Condition.CHILDREN_APPLIED: "False",
    Condition.MODEL_AVAILABLE: "False",
    Condition.PAIRING_COMPATIBLE: "False",
    Condition.REPLICAS_CONTESTED: "True",
    Condition.TRANSPORT_DEGRADED: "True",
    Condition.READY: "",
}
"""Conditions worth an event, and the status that makes it a warning; a status of it is told in either direction."""
_WARNING_REASONS = frozenset({"DeadlineExceeded", "RevisionNotFound"})
_QUIET_REASONS = frozenset({"Observing", "NoGatewayWord", "FewHandoffs", "NoPairYet", "NoWorkerServes", "Asleep"})


class Events:
    """Writes events of one operator."""

    def __init__(self, api: KubeApi, instance: str, stamp: Callable[[], str]) -> None:
        """
        Args:
            instance: this operator's name.
            stamp: the wall clock, RFC 3339.
        """
        self._api = api
        self._instance = instance
        self._stamp = stamp

    def tell(self, pool: Pool, status: Mapping[str, Any], told: dict[str, str]) -> None:
        """Write an event for each condition whose reason is not the one in `told`, and note it there."""
        for type_, warning, reason, message in news(status, told):
            told[type_] = reason
            self._write(pool, "Warning" if warning else "Normal", reason, message)

    def _write(self, pool: Pool, kind: str, reason: str, message: str) -> None:
        stamp = self._stamp()
        event: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{pool.name}.", "namespace": pool.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": "InferencePool",
                "namespace": pool.namespace,
                "name": pool.name,
                "uid": pool.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            self._api.create(event)
        except KvferryError as error:
            _log.warning("pool %s/%s: an event was not written: %s", pool.namespace, pool.name, error.message)


def news(status: Mapping[str, Any], told: Mapping[str, str]) -> list[tuple[str, bool, str, str]]:
    """(type, whether it is a warning, reason, message) of each condition whose reason was not told yet. Pure."""
    found = []
    for entry in status["conditions"]:
        condition = Condition(entry["type"])
        reason = entry["reason"]
        if condition not in _WARNS or reason in _QUIET_REASONS or told.get(condition) == reason:
            continue
        warning = entry["status"] == _WARNS[condition] or reason in _WARNING_REASONS
        if condition not in told and not warning and condition not in (Condition.READY, Condition.PROGRESSING):
            continue  # all is well from the start: nothing new
        found.append((condition.value, warning, reason, entry["message"]))
    return found
