"""Client of the Kubernetes API: URL paths, server-side apply, and error responses as kvferry errors. Blocking.

Manifests are plain dictionaries, since the typed classes of the official client would only add conversions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import urllib3
from kubernetes import config as kube_config
from kubernetes.client import ApiClient, Configuration

from kvferry.core.errors import KvferryError, Unavailable, UsageError
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import Json

_TIMEOUT_SECONDS = 15.0
_PAGE = 500
_CONNECTIONS = 16
_ATTEMPTS = 4
"""Maximum number of attempts of one apply, while other writers change the object."""
_BUSY = frozenset({429, 502, 503, 504})
"""HTTP status codes after which a request may be retried."""
_MANAGER = re.compile(r'conflict(?:s)? with "([^"]+)"')

PLURALS = {
    "Node": "nodes",
    "Pod": "pods",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "Deployment": "deployments",
    "ControllerRevision": "controllerrevisions",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "PodMonitor": "podmonitors",
    "InferencePool": "inferencepools",
    names.EXTENSION_KIND: "inferencepools",
    "PoolRoleScaler": "poolrolescalers",
    "Lease": "leases",
    "Event": "events",
}


class ApiRefusal(KvferryError):
    """The API server rejected a request."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message, reason=reason.upper() or "API_REFUSAL")
        self.status = status


@dataclass(frozen=True, slots=True)
class Conflict:
    """Conflict over a field of the applied manifest, which a different field manager owns."""

    manager: str
    field: str


class FieldConflict(ApiRefusal):
    """The apply failed because different field managers own fields of the manifest."""

    def __init__(self, message: str, conflicts: tuple[Conflict, ...]) -> None:
        super().__init__(409, "Conflict", message)
        self.conflicts = conflicts

    @property
    def managers(self) -> frozenset[str]:
        """Field managers that own the conflicting fields."""
        return frozenset(conflict.manager for conflict in self.conflicts)


class KubeApi:
    """Client of one API server. Thread-safe.

    Methods take kinds of `PLURALS`, and API versions such as `v1` or `apps/v1`. Every request raises `ApiRefusal` if
    the API server rejects it, and `Unavailable` if the server does not answer or is busy. A write also raises
    `Unavailable` if this operator no longer holds the lease.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self.num_calls: dict[str, int] = {}
        """Number of calls by verb and kind, for metrics and tests."""
        self.may_write: Callable[[], bool] = lambda: True
        """Callback that is checked before each write, except writes of Lease objects, which acquire the permission to
        write."""

    @classmethod
    def connect(cls, kubeconfig: str = "", context: str = "") -> "KubeApi":
        """Connect with the pod's service account, or with a kubeconfig.

        Raises:
            UsageError: credentials are missing or cannot be read.
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
            raise UsageError(f"cannot connect to a Kubernetes API server: {error}", field="kubeconfig") from error
        configuration.connection_pool_maxsize = _CONNECTIONS
        return cls(ApiClient(configuration))

    @property
    def configuration(self) -> Configuration:
        """Address and credentials for the API server."""
        found: Configuration = self._client.configuration
        return found

    @property
    def authorization(self) -> str:
        """Value of the Authorization header; empty with client certificates. Rotated service account tokens are
        reloaded."""
        for name in ("BearerToken", "authorization"):
            found = self.configuration.get_api_key_with_prefix(name)
            if found:
                return str(found)
        return ""

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Json | None:
        """Read an object; return `None` if it does not exist."""
        try:
            return self._call("GET", path_of(api_version, kind, namespace, name), kind)
        except ApiRefusal as refusal:
            if refusal.status == 404:
                return None
            raise

    def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Iterator[Json]:
        """List objects of a kind, page by page.

        Args:
            api_version: API version of the kind.
            kind: kind of the objects.
            namespace: namespace of the objects; `None` for all namespaces.
            labels: labels that the objects must have; an empty value matches any value.
            fields: fields that must have these values, for example `metadata.name`.
        """
        query = {"limit": str(_PAGE)}
        if fields:
            query["fieldSelector"] = ",".join(f"{k}={v}" for k, v in fields.items())
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
        """Send a GET request for a path and return the decoded response."""
        return self._call("GET", path, "Raw")

    def serves(self, api_version: str, plural: str) -> bool:
        """Return whether the cluster serves a kind."""
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
        """Apply a manifest by server-side apply. Conflicts between kvferry's field managers are forced; other conflicts
        are raised.

        Args:
            manifest: the object, with only the fields to own.
            manager: field manager that owns the fields.
            subresource: subresource to write, for example `status`; empty for the object itself.
            force: whether to take fields from all other field managers.
            dry_run: whether to validate the write without storing it.

        Raises:
            FieldConflict: a field is owned by a field manager that does not belong to kvferry.
            ApiRefusal: the API server rejected the manifest for a different reason.
            Unavailable: the API server does not answer or is busy, the object changes too often, or this operator no
                longer holds the lease.
        """
        meta = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], meta.get("namespace"), meta["name"])
        path += f"/{subresource}" if subresource else ""
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        if dry_run:
            query["dryRun"] = "All"
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                return self._call("PATCH", path, manifest["kind"], query, manifest, "application/apply-patch+yaml")
            except FieldConflict as conflict:
                if query["force"] == "true" or not conflict.managers <= names.OWN_MANAGERS:
                    raise
                query["force"] = "true"
            except ApiRefusal as refusal:
                # 409: the object changed while the API server merged the manifest, so the write is retried.
                if refusal.status != 409 or not attempts_left:
                    raise
        raise Unavailable(f"{path} changes too often to be applied")

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
        """Send a merge patch for an object or subresource; return the stored object.

        Args:
            api_version, kind, namespace, name: the object.
            change: JSON merge patch (RFC 7386).
            subresource: subresource to write, for example `status`; empty for the object itself.
            manager: field manager of the change.
        """
        path = path_of(api_version, kind, namespace, name) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": manager}
        return self._call("PATCH", path, kind, query, change, "application/merge-patch+json")

    def json_patch(
        self, api_version: str, kind: str, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Json:
        """Send a JSON patch for an object; return the stored object.

        Args:
            api_version, kind, namespace, name: the object.
            operations: operations of the patch (RFC 6902).

        Raises:
            ApiRefusal: an operation cannot be applied, or the API server rejected the patch.
        """
        path = path_of(api_version, kind, namespace, name)
        return self._call(
            "PATCH", path, kind, {"fieldManager": names.FIELD_MANAGER}, operations, "application/json-patch+json"
        )

    def create(self, manifest: Mapping[str, Any]) -> Json | None:
        """Create an object; return `None` if an object with its name exists."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace"))
        try:
            return self._call(
                "POST", path, manifest["kind"], {"fieldManager": names.FIELD_MANAGER}, manifest, "application/json"
            )
        except ApiRefusal as refusal:
            if refusal.status == 409 and refusal.reason == "ALREADYEXISTS":
                return None
            raise

    def would_create(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether no object of this kind and name exists. It is neither read nor written: a dry run of its
        creation needs only the permission to create."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace"))
        query = {"fieldManager": names.FIELD_MANAGER, "dryRun": "All"}
        try:
            self._call("POST", path, f"{manifest['kind']}DryRun", query, manifest, "application/json")
        except ApiRefusal as refusal:
            if refusal.status == 409 and refusal.reason == "ALREADYEXISTS":
                return False
            raise
        return True

    def replace(self, manifest: Mapping[str, Any]) -> Json:
        """Replace an object if its `resourceVersion` still equals the one in `manifest`.

        Raises:
            ApiRefusal: the write was rejected; with status 409 if the object has changed.
        """
        meta = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], meta.get("namespace"), meta["name"])
        return self._call("PUT", path, manifest["kind"], {}, manifest, "application/json")

    def delete(self, api_version: str, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Delete an object and, in the background, its dependents. A missing object is not an error.

        Args:
            api_version, kind, namespace, name: the object.
            uid: uid that the object must have, otherwise it is not deleted; empty for any.
        """
        body: Json = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._call("DELETE", path_of(api_version, kind, namespace, name), kind, {}, body, "application/json")
        except ApiRefusal as refusal:
            if refusal.status not in (404, 409):
                raise

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        kind: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        content_type: str = "",
    ) -> Json:
        if method != "GET" and kind != "Lease" and not self.may_write():
            raise Unavailable("this operator no longer holds the lease", reason="NOT_LEADING")
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
            # Bypass the official client's wrapper, which would decode and re-encode; use its connection pool, which has
            # the certificates.
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
        except msgspec.DecodeError:  # "404 page not found": the API group is not served
            answer = {"message": response.data[:200].decode(errors="replace").strip()}
        if response.status in _BUSY:
            raise Unavailable(f"the API server is busy: {_refusal(response.status, answer).message}")
        if response.status >= 400:
            raise _refusal(response.status, answer)
        return answer if isinstance(answer, dict) else {}


def encode(body: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bytes:
    """Encode JSON as Go does: keys sorted, and `<`, `>` and `&` escaped.

    The API server compares a ControllerRevision's data byte by byte with its own encoding. If they differ, it rejects
    every later change of the metadata, and the garbage collector could then not orphan the object.
    """
    raw = msgspec.json.encode(body, order="sorted")
    for character, escaped in ((b"&", rb"\u0026"), (b"<", rb"\u003c"), (b">", rb"\u003e")):
        raw = raw.replace(character, escaped)
    return raw


def path_of(api_version: str, kind: str, namespace: str | None, name: str = "") -> str:
    """Return the URL path of a collection, or of one object.

    Args:
        api_version: API version of the kind.
        kind: one of `PLURALS`.
        namespace: namespace; `None` for objects without a namespace, and for all namespaces.
        name: name of the object; empty for the collection.
    """
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
