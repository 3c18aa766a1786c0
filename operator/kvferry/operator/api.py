"""The only talker to the Kubernetes API: paths, server-side apply, and its refusals as errors of ours. Blocking.

Plain calls instead of the client's typed classes: they would turn manifests into objects and back.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import urllib3
from kubernetes import config as kube_config
from kubernetes.client import ApiClient, Configuration

from kvferry.core.errors import KvferryError, Unavailable, UsageError
from kvferry.operator import names
from kvferry.operator.spec import Json

_TIMEOUT_SECONDS = 15.0
_PAGE = 500
_CONNECTIONS = 16
_BUSY = frozenset({429, 502, 503, 504})
"""Answers that say nothing about the request; it may be made again."""
_MANAGER = re.compile(r'conflict(?:s)? with "([^"]+)"')

PLURALS = {
    "Node": "nodes",
    "Pod": "pods",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "Secret": "secrets",
    "Deployment": "deployments",
    "ControllerRevision": "controllerrevisions",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "PodMonitor": "podmonitors",
    "InferencePool": "inferencepools",
    "PoolRoleScaler": "poolrolescalers",
    "Lease": "leases",
    "Event": "events",
}


class ApiRefusal(KvferryError):
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message, reason=reason.upper() or "API_REFUSAL")
        self.status = status


@dataclass(frozen=True, slots=True)
class Conflict:
    """One field that somebody else owns."""

    manager: str
    field: str


class FieldConflict(ApiRefusal):
    """Somebody else owns fields that were to be applied."""

    def __init__(self, message: str, conflicts: tuple[Conflict, ...]) -> None:
        super().__init__(409, "Conflict", message)
        self.conflicts = conflicts

    @property
    def managers(self) -> frozenset[str]:
        """Who owns them."""
        return frozenset(conflict.manager for conflict in self.conflicts)


class KubeApi:
    """A connection to one API server. Safe from several threads."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self.num_calls: dict[str, int] = {}
        """Calls so far by verb and kind, for the metrics and for tests that count them."""
        self.may_write: Callable[[], bool] = lambda: True
        """Asked before each write but those of leases, which are written in order to be allowed to."""

    @classmethod
    def connect(cls, kubeconfig: str = "", context: str = "") -> "KubeApi":
        """With the pod's own credentials, or those of a kubeconfig.

        Raises:
            UsageError: there are none, or they cannot be read.
        """
        configuration = Configuration()
        try:
            if kubeconfig or context:
                kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=kubeconfig or None, context=context or None, client_configuration=configuration
                )
            else:
                kube_config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except kube_config.ConfigException as error:
            raise UsageError(f"no way to a Kubernetes API server: {error}", field="kubeconfig") from error
        configuration.connection_pool_maxsize = _CONNECTIONS
        return cls(ApiClient(configuration))

    @property
    def configuration(self) -> Configuration:
        """Where the API server is and who we are to it."""
        found: Configuration = self._client.configuration
        return found

    @property
    def authorization(self) -> str:
        """The Authorization header; empty: certificates speak for us. Tokens of pods are read anew when they change."""
        for name in ("BearerToken", "authorization"):
            found = self.configuration.get_api_key_with_prefix(name)
            if found:
                return str(found)
        return ""

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Json | None:
        """The object, or `None`."""
        try:
            return self._call("GET", path_of(api_version, kind, namespace, name), kind)
        except ApiRefusal as refusal:
            if refusal.status == 404:
                return None
            raise

    def list(
        self, api_version: str, kind: str, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> Iterator[Json]:
        """All objects of a kind, in one namespace or everywhere, page by page; an empty label value means any."""
        query = {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{k}={v}" if v else k for k, v in labels.items())
        while True:
            page = self._call("GET", path_of(api_version, kind, namespace), kind, query=query)
            yield from page.get("items") or ()
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return
            query["continue"] = more

    def raw(self, path: str) -> Json:
        """What the server says at a path."""
        return self._call("GET", path, "Raw")

    def serves(self, api_version: str, plural: str) -> bool:
        """Whether the cluster has this kind now."""
        try:
            found = self._call("GET", _root(api_version), "APIResourceList")
        except ApiRefusal as refusal:
            if refusal.status == 404:
                return False
            raise
        return any(resource["name"] == plural for resource in found.get("resources") or ())

    # -- writing -------------------------------------------------------------------------------------------------------

    def apply(
        self,
        manifest: Mapping[str, Any],
        *,
        manager: str = names.FIELD_MANAGER,
        subresource: str = "",
        force: bool = False,
        dry_run: bool = False,
    ) -> Json:
        """Server-side apply. Fields change hands among our own managers; another's are left alone.

        Raises:
            FieldConflict: somebody else owns a field.
            ApiRefusal: anything else.
        """
        meta = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], meta.get("namespace"), meta["name"])
        path += f"/{subresource}" if subresource else ""
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        if dry_run:
            query["dryRun"] = "All"
        try:
            return self._call("PATCH", path, manifest["kind"], query, manifest, "application/apply-patch+yaml")
        except FieldConflict as conflict:
            if force or not conflict.managers <= names.OWN_MANAGERS:
                raise
            return self.apply(manifest, manager=manager, subresource=subresource, force=True, dry_run=dry_run)

    def patch(
        self,
        api_version: str,
        kind: str,
        namespace: str,
        name: str,
        change: Mapping[str, Any],
        *,
        subresource: str = "",
        manager: str = names.FIELD_MANAGER,
    ) -> Json:
        """A merge patch."""
        path = path_of(api_version, kind, namespace, name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": manager}
        return self._call("PATCH", path, kind, query, change, "application/merge-patch+json")

    def create(self, manifest: Mapping[str, Any]) -> Json | None:
        """The new object; `None` when there was one of that name."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace"))
        try:
            return self._call(
                "POST", path, manifest["kind"], {"fieldManager": names.FIELD_MANAGER}, manifest, "application/json"
            )
        except ApiRefusal as refusal:
            if refusal.status == 409 and refusal.reason == "ALREADYEXISTS":
                return None
            raise

    def replace(self, manifest: Mapping[str, Any]) -> Json:
        """Replace an object whose `resourceVersion` must still be the one in `manifest`."""
        meta = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], meta.get("namespace"), meta["name"])
        return self._call("PUT", path, manifest["kind"], {}, manifest, "application/json")

    def delete(self, api_version: str, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Delete an object, only the one with `uid` if that is given; fine when it is gone."""
        body: Json = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._call("DELETE", path_of(api_version, kind, namespace, name), kind, {}, body, "application/json")
        except ApiRefusal as refusal:
            if refusal.status not in (404, 409):
                raise

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        kind: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
    ) -> Json:
        if method != "GET" and kind != "Lease" and not self.may_write():
            raise Unavailable("another operator may lead now", reason="NOT_LEADING")
        counted = f"{method} {kind}"
        self.num_calls[counted] = self.num_calls.get(counted, 0) + 1
        configuration = self._client.configuration
        headers = {"Accept": "application/json", "User-Agent": "kvferry-operator"}
        if content_type:
            headers["Content-Type"] = content_type
        if self.authorization:
            headers["Authorization"] = self.authorization
        url = f"{configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            # The client's own wrapper decodes and re-encodes; its connection pool has the certificates.
            response = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else encode(body),
                headers=headers,
                timeout=_TIMEOUT_SECONDS,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(f"the API server does not answer: {error}", reason="API_SERVER_AWAY") from error
        try:
            answer = msgspec.json.decode(response.data) if response.data else {}
        except msgspec.DecodeError:  # "404 page not found": a group that nobody serves
            answer = {"message": response.data[:200].decode(errors="replace").strip()}
        if response.status in _BUSY:
            raise Unavailable(f"the API server is busy: {_refusal(response.status, answer).message}")
        if response.status >= 400:
            raise _refusal(response.status, answer)
        return answer if isinstance(answer, dict) else {}


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON as Go writes it: keys sorted, and `<`, `>` and `&` escaped.

    The server compares a ControllerRevision's data byte by byte with what its own encoder makes of it, and refuses
    every later change of its metadata where they differ; its garbage collector could then not orphan it.
    """
    raw = msgspec.json.encode(body, order="sorted")
    for character, escaped in ((b"&", rb"\u0026"), (b"<", rb"\u003c"), (b">", rb"\u003e")):
        raw = raw.replace(character, escaped)
    return raw


def path_of(api_version: str, kind: str, namespace: str | None, name: str = "") -> str:
    """The path of a kind's collection or of one object."""
    path = _root(api_version)
    if namespace:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{PLURALS[kind]}"
    return f"{path}/{quote(name, safe='')}" if name else path


def _root(api_version: str) -> str:
    return f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"


def _refusal(status: int, answer: Any) -> ApiRefusal:
    body = answer if isinstance(answer, dict) else {}
    reason, message = str(body.get("reason") or ""), str(body.get("message") or f"HTTP {status}")
    causes = (body.get("details") or {}).get("causes") or ()
    conflicts = tuple(
        Conflict(found.group(1), str(cause.get("field", "")))
        for cause in causes
        if cause.get("reason") == "FieldManagerConflict" and (found := _MANAGER.search(str(cause.get("message", ""))))
    )
    return FieldConflict(message, conflicts) if conflicts else ApiRefusal(status, reason, message)
