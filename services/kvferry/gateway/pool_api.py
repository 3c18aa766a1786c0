"""The few things that a gateway asks of a cluster's API server, about one pool; blocking, so called from threads.

Plain requests over the connection that the official client sets up from a service account or a kubeconfig: its model
classes would cost more than they save, since slices are read as JSON in any case.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kvferry.core.config import environment
from kvferry.core.errors import UsageError
from kvferry.gateway.config import PoolName
from kvferry.gateway.discovery import POOL_LABEL

SCALER_GROUP = "kvferry.dev"
SCALER_VERSION = "v1alpha1"
SCALER_PLURAL = "poolrolescalers"
FIELD_MANAGER = "kvferry-gateway"
"""The operator takes a number back from this manager without a conflict."""
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 15.0
_SILENCE_SECONDS = 90.0
"""A watch hears at least a bookmark a minute."""
_MAX_BYTES = 64 << 20
_MAX_MESSAGE_CHARS = 300


class ApiTrouble(Exception):
    """The API server did not do what it was asked; says why."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 0: there was no answer."""


class Watch:
    """The events of one watch, until it ends or is stopped. Close it; it is a context manager."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """
        Raises:
            ApiTrouble: the connection broke.
        """
        rest = b""
        parts = self._response.stream(amt=None, decode_content=True)
        while True:
            try:
                part = next(parts, None)
            except Exception as error:  # urllib3's own, sockets', http.client's: all mean the same here
                raise ApiTrouble(f"the watch broke off: {_short(error)}") from error
            if part is None:
                return
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _MAX_BYTES:
                raise ApiTrouble(f"an event has more than {_MAX_BYTES} bytes")
            for line in filter(None, lines):
                yield _object(line)

    def stop(self) -> None:
        """End it from another thread."""
        with suppress(Exception):  # it may be ending by itself
            self._response.shutdown()


class PoolApi:
    """One pool at one API server."""

    def __init__(self, pool: PoolName, client: Any) -> None:
        """
        Args:
            client: a `kubernetes.client.ApiClient`.
        """
        self.pool = pool
        self._configuration = client.configuration
        self._http = client.rest_client.pool_manager

    @classmethod
    def connect(cls, pool: PoolName) -> "PoolApi":
        """With the service account of the pod that this is, else with what `KUBECONFIG` names.

        Raises:
            UsageError: there is neither, or the client library is not installed.
        """
        try:
            # Imported here: it takes most of a second, and only a gateway of a pool needs it.
            import kubernetes
        except ImportError as error:
            raise UsageError("--pool needs the extra kvferry[operator]: it asks the cluster", field="pool") from error
        library: Any = kubernetes  # it is typed here and there
        configuration = library.client.Configuration()
        try:
            try:
                library.config.load_incluster_config(client_configuration=configuration)
            except library.config.ConfigException:
                # Said here, since the library reads the variable only once, when it is imported.
                file = environment().get("KUBECONFIG") or None
                library.config.load_kube_config(config_file=file, client_configuration=configuration)
        except Exception as error:  # also what YAML, files and certificates raise
            raise UsageError(
                f"no credentials for the cluster: there is no service account, and no kubeconfig ({_short(error)}); "
                "run in a pod, or name a file in KUBECONFIG",
                field="pool",
            ) from error
        return cls(pool, library.client.ApiClient(configuration))

    def close(self) -> None:
        """Close idle connections."""
        self._http.clear()

    def list_slices(self) -> Mapping[str, Any]:
        """All EndpointSlices of the pool.

        Raises:
            ApiTrouble: see there.
        """
        return self._ask("GET", self._slices(""))

    def watch_slices(self, version: str, seconds: float) -> Watch:
        """What changes after `version`, for about so long.

        Raises:
            ApiTrouble: it was refused, with status 410 when `version` is too old.
        """
        query = f"&watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={max(1, round(seconds))}"
        return Watch(self._request("GET", self._slices(query), _SILENCE_SECONDS))

    def scaler(self, role: str) -> Mapping[str, Any] | None:
        """The scaler object of a role; `None`: the pool has none.

        Raises:
            ApiTrouble: see there.
        """
        try:
            return self._ask("GET", self._scaler(role))
        except ApiTrouble as trouble:
            if trouble.status == 404:
                return None
            raise

    def wake(self, role: str, version: str) -> None:
        """Set a role's replicas to 1, if its scaler is still the `version` that had 0.

        Raises:
            ApiTrouble: see there; status 409: the scaler has changed meanwhile.
        """
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": 1}}
        self._ask("PATCH", f"{self._scaler(role)}/scale?fieldManager={FIELD_MANAGER}", body)

    def _slices(self, query: str) -> str:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.pool.namespace}/endpointslices"
        return f"{path}?labelSelector={POOL_LABEL.replace('/', '%2F')}%3D{self.pool.name}{query}"

    def _scaler(self, role: str) -> str:
        namespace, name = self.pool.namespace, f"{self.pool.name}-{role}"
        return f"/apis/{SCALER_GROUP}/{SCALER_VERSION}/namespaces/{namespace}/{SCALER_PLURAL}/{name}"

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        response = self._request(method, path, _ANSWER_SECONDS, body)
        try:
            return _object(response.read(_MAX_BYTES))
        except ApiTrouble:
            raise
        except Exception as error:
            raise ApiTrouble(f"the API server's answer broke off: {_short(error)}") from error
        finally:
            response.close()

    def _request(self, method: str, path: str, seconds: float, body: Mapping[str, Any] | None = None) -> Any:
        from urllib3 import Timeout

        try:
            headers = {"accept": "application/json", **self._credentials()}
            if body is not None:
                headers["content-type"] = "application/merge-patch+json"
            response = self._http.request(
                method,
                self._configuration.host + path,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=Timeout(connect=_CONNECT_SECONDS, read=seconds),
                preload_content=False,
                retries=False,
            )
        except Exception as error:  # urllib3's own, sockets', a token file that cannot be read
            raise ApiTrouble(f"the API server cannot be reached: {_short(error)}") from error
        if response.status >= 300:
            try:
                said = response.read(4096).decode(errors="replace")
            except Exception as error:
                said = _short(error)
            finally:
                response.close()
            raise ApiTrouble(_refusal(method, path, response.status, said), response.status)
        return response

    def _credentials(self) -> dict[str, str]:
        """Headers; read anew for each request, since tokens of service accounts expire."""
        auths = self._configuration.auth_settings().values()
        return {auth["key"]: auth["value"] for auth in auths if auth["in"] == "header" and auth["value"]}


def _refusal(method: str, path: str, status: int, said: str) -> str:
    with suppress(ValueError, TypeError, KeyError):
        said = str(json.loads(said)["message"])
    remedy = "; allow it to the gateway's service account" if status in (401, 403) else ""
    return f"{method} {path.partition('?')[0]} was refused with {status}: {said[:_MAX_MESSAGE_CHARS]}{remedy}"


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ApiTrouble("the API server sent what is no JSON") from error
    if not isinstance(read, dict):
        raise ApiTrouble("the API server sent JSON that is no object")
    return read


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
