"""Watches, which kopf runs: the watched kinds, and the forwarding of their events.

Only `on.event` handlers are used. They need no finalizer and no annotation, so that a pool can be deleted while no
operator runs and kopf stores no state in objects.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import kopf

from kvferry.operator.api import KubeApi
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import Json

Saw = Callable[[str, Mapping[str, Any], bool], None]
"""Callback for watch events: kind, object, and whether the object was deleted."""

WATCHED: Mapping[str, tuple[str, str, str]] = {
    "InferencePool": (names.GROUP, names.VERSION, names.POOLS),
    "PoolRoleScaler": (names.GROUP, names.VERSION, names.SCALERS),
    "Deployment": ("apps", "v1", "deployments"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "Role": ("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "ControllerRevision": ("apps", "v1", "controllerrevisions"),
}
"""Watched kinds with group, version and plural."""

POLLED: Mapping[str, tuple[str, str]] = {"PodMonitor": POD_MONITOR, names.EXTENSION_KIND: EXTENSION_POOL}
"""Optional kinds with apiVersion and plural, which are listed periodically while the cluster serves them: kopf does not
detect that a kind was installed or removed."""

_SERVER_TIMEOUT_SECONDS = 300
"""Maximum duration of a watch request in seconds. kopf 1.45 then continues from the last resource version, so that no
event is lost. It lists the objects again only if the API server no longer has this version (410 Gone), and then reports
those that exist, but not those that were deleted meanwhile; see `registry`."""


def registry(saw: Saw, listed: Callable[[], None], api: KubeApi) -> kopf.OperatorRegistry:
    """Build kopf's registry, with handlers for all watched kinds and for the login to the API server.

    Args:
        saw: called with each event.
        listed: called when kopf has listed a kind, at the start or after a gap in a watch. Objects that were deleted in
            the gap can only be found by a comparison with a new list.
        api: client with the API server's address and credentials.
    """
    handlers = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        connection = api.configuration
        scheme, __, value = api.authorization.rpartition(" ")
        info = kopf.ConnectionInfo(
            server=connection.host,
            ca_path=connection.ssl_ca_cert,
            insecure=not connection.verify_ssl,
            certificate_path=connection.cert_file,
            private_key_path=connection.key_file,
            scheme=scheme or None,
            token=value or None,
        )
        # kopf closes the session.
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            trace_configs=[_trace_of_lists(listed)],
        )
        return kopf.AiohttpSession(server=info.server, aiohttp_session=session)

    kopf.on.login(registry=handlers, id="login")(login)
    for kind, (group, version, plural) in WATCHED.items():
        # Handlers are asynchronous, since kopf runs plain functions in threads and the store belongs to the event loop.
        # The kind is bound as a default value, since the handler is called after the loop.
        async def on_event(body: kopf.Body, watched: str = kind, **event: Any) -> None:
            saw(watched, dict(body), event["type"] == "DELETED")

        kopf.on.event(*resource(group, version, plural), registry=handlers, id=f"saw-{plural}")(on_event)
    return handlers


def _trace_of_lists(listed: Callable[[], None]) -> aiohttp.TraceConfig:
    """Return a trace that calls `listed` after each list of a watched kind. kopf has no handler for the end of a list,
    and no event if a kind has no objects."""
    plurals = {plural for _, __, plural in WATCHED.values()}

    async def ended(_: object, __: object, request: aiohttp.TraceRequestEndParams) -> None:
        if request.url.name in plurals and "watch" not in request.url.query and request.response.status == 200:
            listed()

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    return trace


def settings(workers: int) -> kopf.OperatorSettings:
    """Return settings for kopf in which everything but watching is disabled.

    Args:
        workers: maximum number of concurrent workers of kopf per kind.
    """
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
        if kind != names.POOL_KIND:  # only kvferry's objects are listed
            made.watching.label_selectors[resource(group, version, plural)] = names.LABEL_POOL
    made.persistence.finalizer = f"{names.GROUP}/finalizer"
    # kopf would write about its login at each start, and "succeeded" for every event of every object.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    return made


def resource(group: str, version: str, plural: str) -> tuple[str, str]:
    """Convert a kind to kopf's notation."""
    return f"{group}/{version}" if group else version, plural


def list_all(api: KubeApi, kind: str, namespaces: Sequence[str]) -> list[Json]:
    """List all objects of a watched or polled kind that belong to pools. Blocking."""
    labels = {} if kind == names.POOL_KIND else {names.LABEL_POOL: ""}
    found: list[Json] = []
    for namespace in namespaces or (None,):
        found += api.list(api_version_of(kind), kind, namespace, labels)
    return found


def api_version_of(kind: str) -> str:
    """Return the apiVersion of a watched or polled kind."""
    if kind in POLLED:
        return POLLED[kind][0]
    group, version, _ = WATCHED[kind]
    return f"{group}/{version}" if group else version
