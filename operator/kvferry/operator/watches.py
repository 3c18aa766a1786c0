"""The kopf side: which kinds are watched, and that every event is told. Nothing is decided here.

Only `on.event` handlers: they need no finalizer and no annotation, so a pool can always be deleted, also while no
operator runs, and kopf keeps no state in anybody's objects.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kopf

from kvferry.operator import names
from kvferry.operator.api import KubeApi
from kvferry.operator.spec import Json

Saw = Callable[[str, Mapping[str, Any], bool], None]
"""Called with kind, object and whether it is gone."""

WATCHED: Mapping[str, tuple[str, str, str]] = {
    "InferencePool": (names.GROUP, names.VERSION, names.POOLS),
    "PoolRoleScaler": (names.GROUP, names.VERSION, names.SCALERS),
    "Deployment": ("apps", "v1", "deployments"),
    "Service": ("", "v1", "services"),
}
"""Kind to group, version and plural."""

_SERVER_TIMEOUT_SECONDS = 300
"""The server ends a watch after so long, and it begins anew with a list."""


def registry(saw: Saw, api: KubeApi) -> kopf.OperatorRegistry:
    """Handlers for all watched kinds, and the way to the API server."""
    handlers = kopf.OperatorRegistry()

    def login(**_: Any) -> kopf.ConnectionInfo:
        connection = api.configuration
        scheme, __, value = api.authorization.rpartition(" ")
        return kopf.ConnectionInfo(
            server=connection.host,
            ca_path=connection.ssl_ca_cert,
            insecure=not connection.verify_ssl,
            certificate_path=connection.cert_file,
            private_key_path=connection.key_file,
            scheme=scheme or None,
            token=value or None,
        )

    kopf.on.login(registry=handlers, id="login")(login)
    for kind, (group, version, plural) in WATCHED.items():
        # Asynchronous: kopf runs plain functions in threads of its own, and what is told belongs to the event loop.
        # The loop over the kinds is over when this is called, so the kind travels as a default value.
        async def on_event(body: kopf.Body, told: str = kind, **event: Any) -> None:
            saw(told, dict(body), event["type"] == "DELETED")

        kopf.on.event(*resource(group, version, plural), registry=handlers, id=f"saw-{plural}")(on_event)
    return handlers


def settings(workers: int) -> kopf.OperatorSettings:
    """kopf's own settings: watch, and nothing else."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.watching.server_timeout = _SERVER_TIMEOUT_SECONDS
    made.watching.client_timeout = _SERVER_TIMEOUT_SECONDS + 30
    made.watching.connect_timeout = 10
    made.networking.request_timeout = 30
    made.queueing.worker_limit = workers
    made.queueing.idle_timeout = 1.0
    for kind, (group, version, plural) in WATCHED.items():
        if kind != "InferencePool":  # of the cluster's other Deployments and Services not even the list is wanted
            made.watching.label_selectors[resource(group, version, plural)] = names.LABEL_POOL
    made.persistence.finalizer = f"{names.GROUP}/finalizer"
    # It would say "succeeded" for every event of every object.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return made


def resource(group: str, version: str, plural: str) -> tuple[str, str]:
    """How kopf reads a kind."""
    return f"{group}/{version}" if group else version, plural


def list_all(api: KubeApi, kind: str, namespaces: Sequence[str]) -> list[Json]:
    """Every object of a watched kind, as the watch would tell of it. Blocking."""
    group, version, _ = WATCHED[kind]
    labels = {} if kind == "InferencePool" else {names.LABEL_POOL: ""}
    found: list[Json] = []
    for namespace in namespaces or (None,):
        found += api.list(f"{group}/{version}" if group else version, kind, namespace, labels)
    return found
