"""Generates CAs, and writes the certificates and keys that they sign to Secrets, which the operator cannot read.

The private key of a CA is kept in memory until it has signed, and is never written. A Secret is created or replaced as
a whole (PUT), which needs no permission to read it; the uid recorded at its creation protects Secrets of other owners.
"""

import base64
import threading
from collections.abc import Callable

from kvferry.core.errors import UsageError
from kvferry.operator.api import ApiRefusal, KubeApi
from kvferry.operator.objects.pool_tls import GATEWAY, WORKER
from kvferry.operator.plan.actions import WriteTls, target_of
from kvferry.operator.pool.spec import Json
from kvferry.operator.pool.tls_state import TlsState, data_of
from kvferry.rpc.tls.authority import GATEWAY_NAME, WORKER_NAME, Authority, facts_of

_NAMES = {WORKER: WORKER_NAME, GATEWAY: GATEWAY_NAME}


class Certificates:
    """The CAs that the operator has generated and that have not signed yet, by pool. Thread-safe for different
    pools."""

    def __init__(self, api: KubeApi, wall: Callable[[], float]) -> None:
        """
        Args:
            api: client for the writes of Secrets and ConfigMaps.
            wall: returns the wall-clock time in seconds since the epoch.
        """
        self._api = api
        self._wall = wall
        self._drawn: dict[str, Authority] = {}
        self._lock = threading.Lock()  # guards _drawn

    def write(self, pool: str, action: WriteTls) -> Json:
        """Execute an action; return the stored ConfigMap.

        Args:
            pool: uid of the pool.
            action: the planned action.

        Raises:
            ApiRefusal: the API server rejected a write, a Secret of that name does not belong to the pool, or
                certificates cannot be generated.
            Unavailable: the API server is unavailable.
        """
        state = action.state
        if not state.bundle and not self._api.would_create(action.secret):
            raise _taken(action)
        try:
            return self._write(pool, action)
        except UsageError as error:
            raise ApiRefusal(422, "CertificatesFailed", error.message) from error

    def _write(self, pool: str, action: WriteTls) -> Json:
        state, stored = action.state, action.config
        if action.draws:
            authority = Authority.draw(self._wall(), action.days)
            state = state.published(authority.certificate, self._wall())
            stored = self._api.apply({**action.config, "data": data_of(state)})
            with self._lock:
                self._drawn[pool] = authority
        if action.issues:
            with self._lock:
                signing = self._drawn[pool]
            state = self._issue(signing, action, state)
            stored = self._api.apply({**action.config, "data": data_of(state)})
            with self._lock:
                del self._drawn[pool]
        return stored

    def _issue(self, authority: Authority, action: WriteTls, state: TlsState) -> TlsState:
        data: dict[str, str] = {}
        for kind, name in _NAMES.items():
            signed = authority.sign(name, self._wall(), action.days)
            data |= {f"{kind}.crt": signed.certificate, f"{kind}.key": signed.key}
            (facts,) = facts_of(signed.certificate)
        secret = {
            **action.secret,
            "data": {name: base64.b64encode(pem.encode()).decode() for name, pem in data.items()},
        }
        return state.issued(self._wall(), facts.not_after, self._store(secret, action, state))

    def _store(self, secret: Json, action: WriteTls, state: TlsState) -> str:
        """Create the Secret, or replace the one that an earlier pass created; return its uid."""
        created = self._api.create(secret)
        if created is not None:
            return str(created["metadata"]["uid"])
        if not action.state.bundle:
            raise _taken(action)
        # If no uid is recorded, the name was free: an earlier pass created the Secret and was interrupted before it
        # recorded the uid.
        known = {"uid": state.secret_uid} if state.secret_uid else {}
        try:
            stored = self._api.replace({**secret, "metadata": {**secret["metadata"], **known}})
        except ApiRefusal as refusal:
            raise _taken(action) if refusal.status == 409 else refusal from refusal
        return str(stored["metadata"]["uid"])


def _taken(action: WriteTls) -> ApiRefusal:
    target = target_of(action.secret)
    return ApiRefusal(409, "NameTaken", f"{target} exists and does not belong to this pool; rename it or the pool")
