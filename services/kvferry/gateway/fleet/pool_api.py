"""Calls of the gateway to a cluster's API server for one pool; they block and therefore run in threads.

Sends plain HTTP requests over the connection pool that the official client configures from a service account or a
kubeconfig. Its model classes are not used, since EndpointSlices are read as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from kvferry.core.errors import UsageError
from kvferry.core.process.config import environment
from kvferry.gateway.decide.config import PoolName
from kvferry.gateway.decide.routing.discovery import POOL_LABEL

SCALER_GROUP = "kvferry.dev"
SCALER_VERSION = "v1alpha1"
SCALER_PLURAL = "poolrolescalers"
FIELD_MANAGER = "kvferry-gateway"
"""Field manager for replica counts that the gateway sets; the operator may overwrite this manager's fields without a
conflict."""
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 15.0
_SILENCE_SECONDS = 90.0
"""Read timeout of a watch in seconds; the server sends at least one bookmark per minute."""
_MAX_BYTES = 64 << 20
_MAX_MESSAGE_CHARS = 300


class ApiError(Exception):
    """A request to the API server failed; the message contains the reason."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 if there was no response."""


class Watch:
    """Iterates over the events of one watch until it ends or is stopped; a context manager."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events of the watch.

        Raises:
            ApiError: the connection was lost, or an event is too large.
        """
        rest = b""
        parts = self._response.stream(amt=None, decode_content=True)
        while True:
            try:
                part = next(parts, None)
            except Exception as error:  # from urllib3, sockets or http.client; all are handled the same way
                raise ApiError(f"the watch was interrupted: {_short(error)}") from error
            if part is None:
                return
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _MAX_BYTES:
                raise ApiError(f"an event has more than {_MAX_BYTES} bytes")
            for line in filter(None, lines):
                yield _object(line)

    def stop(self) -> None:
        """Stop the watch; may be called from a different thread."""
        with suppress(Exception):  # the watch may already be ending
            self._response.shutdown()


class PoolApi:
    """Requests to the API server about one pool's EndpointSlices and scalers."""

    def __init__(self, pool: PoolName, client: Any) -> None:
        """
        Args:
            pool: namespace and name of the pool.
            client: a `kubernetes.client.ApiClient`, whose address, credentials and connections are used.
        """
        self.pool = pool
        self._configuration = client.configuration
        self._http = client.rest_client.pool_manager

    @classmethod
    def connect(cls, pool: PoolName) -> "PoolApi":
        """Connect with the pod's service account if there is one, or else with the kubeconfig file in `KUBECONFIG`.

        Raises:
            UsageError: neither exists, or the client library is not installed.
        """
        try:
            # Imported here: the import takes most of a second, and only a gateway with a pool needs it.
            import kubernetes
        except ImportError as error:
            raise UsageError("--pool needs the kubernetes client; install kvferry[operator]", field="pool") from error
        library: Any = kubernetes  # the package is only partly typed
        configuration = library.client.Configuration()
        try:
            try:
                library.config.load_incluster_config(client_configuration=configuration)
            except library.config.ConfigException:
                # Passed explicitly, since the library reads the variable only at import.
                file = environment().get("KUBECONFIG") or None
                library.config.load_kube_config(config_file=file, client_configuration=configuration)
        except Exception as error:  # e.g. errors in YAML, files and certificates
            raise UsageError(
                f"no credentials for the cluster: no service account and no kubeconfig ({_short(error)}); "
                "run in a pod, or set KUBECONFIG to a kubeconfig file",
                field="pool",
            ) from error
        return cls(pool, library.client.ApiClient(configuration))

    def close(self) -> None:
        """Close idle connections."""
        self._http.clear()

    def list_slices(self) -> Mapping[str, Any]:
        """List all EndpointSlices of the pool.

        Raises:
            ApiError: the request failed.
        """
        return self._ask("GET", self._slices(""))

    def watch_slices(self, version: str, seconds: float) -> Watch:
        """Watch for changes after resource version `version` for about `seconds` seconds.

        Raises:
            ApiError: the request failed; status 410 if `version` has expired.
        """
        query = f"&watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={max(1, round(seconds))}"
        return Watch(self._request("GET", self._slices(query), _SILENCE_SECONDS))

    def scaler(self, role: str) -> Mapping[str, Any] | None:
        """Return the `PoolRoleScaler` object of a role; `None` if it does not exist.

        Raises:
            ApiError: the request failed.
        """
        try:
            return self._ask("GET", self._scaler(role))
        except ApiError as failure:
            if failure.status == 404:
                return None
            raise

    def wake(self, role: str, version: str) -> None:
        """Set a role's replica count to 1, if its scaler still has resource version `version`.

        Args:
            role: role of the workers.
            version: resource version of the scaler when it was read.

        Raises:
            ApiError: the request failed; status 409 if the scaler has changed since.
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
        except ApiError:
            raise
        except Exception as error:
            raise ApiError(f"the API server's response was interrupted: {_short(error)}") from error
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
        except Exception as error:  # from urllib3, sockets or an unreadable token file
            raise ApiError(f"the API server cannot be reached: {_short(error)}") from error
        if response.status >= 300:
            try:
                answer = response.read(4096).decode(errors="replace")
            except Exception as error:
                answer = _short(error)
            finally:
                response.close()
            raise ApiError(_refusal(method, path, response.status, answer), response.status)
        return response

    def _credentials(self) -> dict[str, str]:
        """Return the authentication headers; called for each request, since service account tokens expire."""
        auths = self._configuration.auth_settings().values()
        return {auth["key"]: auth["value"] for auth in auths if auth["in"] == "header" and auth["value"]}


def _refusal(method: str, path: str, status: int, answer: str) -> str:
    with suppress(ValueError, TypeError, KeyError):
        answer = str(json.loads(answer)["message"])
    remedy = "; grant it to the gateway's service account" if status in (401, 403) else ""
    return f"{method} {path.partition('?')[0]} failed with status {status}: {answer[:_MAX_MESSAGE_CHARS]}{remedy}"


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ApiError("the API server's response is not JSON") from error
    if not isinstance(read, dict):
        raise ApiError("the API server's response is not a JSON object")
    return read


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
