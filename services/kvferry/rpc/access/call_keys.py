"""Keys of the roles and tokens of calls.

    pool secret (the ticket key; only workers have it)
      ├── key of role gateway
      ├── key of role worker
      └── key of role operator

    token = "<role> <key id> <audience> <MAC>"      metadata `kvferry-caller` of every call

A process gets only the key of its own role, so that a gateway cannot call methods that are reserved for workers or
operators. The MAC is BLAKE3, keyed with the role's key, over method and audience; the audience is the `host:port` that
the caller dials. A token that was sent to one address is therefore rejected at every other address, even if the first
address now belongs to a different process. Tokens neither encrypt nor authenticate the content of a message. Only the
network or TLS protects against a process that can read and alter the traffic between two pods. The encoding is fixed by
tests/golden/call_keys.json.
"""

from collections.abc import Sequence
from hmac import compare_digest

from blake3 import blake3

from kvferry.core.errors import Unauthenticated
from kvferry.rpc.access.hosts import addresses_of, ip_of, is_host
from kvferry.rpc.access.table import CallerRole

CALLER_METADATA = "kvferry-caller"
"""Metadata key of the token."""
MAX_TOKEN_CHARS = 512
MIN_SECRET_BYTES = 16
MAX_NONCE_BYTES = 64
_CONTEXT = "kvferry 2026-11 call key "
_KEY_ID_BYTES = 4
_MAX_CACHED = 1024


def role_key(secret: bytes, role: CallerRole) -> bytes:
    """Derive the 32-byte key of `role` from a pool's secret.

    Args:
        secret: the pool's secret, at least 16 bytes.
        role: role of the callers.

    Raises:
        ValueError: the secret has fewer than 16 bytes.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a secret needs at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
    return blake3(secret, derive_key_context=_CONTEXT + role).digest()


class CallSigner:
    """Makes the tokens of one process's calls."""

    def __init__(self, role: CallerRole, key: bytes) -> None:
        """
        Args:
            role: role of this process; every token names it.
            key: `role_key` of the role, 32 bytes.
        """
        self.role = role
        self._key = key
        self._prefix = f"{role} {_key_id(key)}"

    def metadata(self, method: str, audience: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of calls of `method` to `audience` (`host:port`).

        Args:
            method: full name of the method, for example `/kvferry.v1.Prefill/Run`.
            audience: address of the server, `host:port`.
        """
        mac = _mac(self._key, "call", method, audience.encode()).hex()
        return ((CALLER_METADATA, f"{self._prefix} {audience} {mac}"),)

    def proves(self, proof: bytes, audience: str, nonce: bytes) -> bool:
        """Return whether `proof` was made from `nonce` by the server at `audience`, which requires the pool's
        secret.

        Args:
            proof: proof that the server has sent.
            audience: address of the server, `host:port`.
            nonce: nonce that this process has sent.
        """
        return compare_digest(proof, _mac(self._key, "proof", audience, nonce))


class CallVerifier:
    """Verifies the tokens of incoming calls of one server. Not thread-safe: used on one event loop."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """
        Args:
            secrets: the pool's secrets, newest first; tokens of each are accepted, so that secrets can be rotated.
        """
        self._keys = {
            (str(role), _key_id(key)): key
            for secret in secrets
            for role in CallerRole
            if (key := role_key(secret, role))
        }
        self._valid: dict[tuple[str, str], CallerRole] = {}
        self._port = ""
        self._hosts: frozenset[str] = frozenset()
        self._names: frozenset[str] = frozenset()

    def listen_at(self, address: str, *more: str) -> None:
        """Set the addresses under which callers reach this server: the bound address and the advertised hosts.

        An IP address is accepted only if it belongs to one of these hosts; the wildcard stands for all addresses of
        this machine. A host name is accepted from a worker only if it is one of these hosts, since workers dial
        advertised hosts. Every host name is accepted from a gateway or an operator, since it may be a name of this
        machine that only the caller's name service resolves.
        """
        host, _, self._port = address.rpartition(":")
        self._names = frozenset({host, *more}) | {"localhost"}
        self._hosts = frozenset(found for text in (host, *more) for found in addresses_of(text))
        self._valid.clear()

    def verify(self, method: str, token: str) -> CallerRole:
        """Return the role of the caller that made `token`.

        Args:
            method: full name of the method, for example `/kvferry.v1.Prefill/Run`.
            token: token of the call; empty if it has none.

        Raises:
            Unauthenticated: the token is missing, malformed, for a different address, or made with an unknown key.
        """
        known = self._valid.get((method, token))
        if known is not None:
            return known
        if not token:
            raise Unauthenticated(
                "the call has no token, and this port serves only processes of the same pool; send client requests to "
                "the gateway",
                reason="CALLER_UNKNOWN",
            )
        parts = token.split(" ")
        if len(token) > MAX_TOKEN_CHARS or len(parts) != 4 or not token.isascii():
            raise Unauthenticated("the call's token is malformed", reason="CALLER_UNKNOWN")
        role, key_id, audience, mac = parts
        key = self._keys.get((role, key_id))
        if key is None:
            raise Unauthenticated(
                "the call's token was made with a key that this worker does not have; configure the gateway with the "
                "key that `kvferry key gateway` derives from the workers' ticket key",
                reason="CALLER_KEY_UNKNOWN",
            )
        if not compare_digest(mac, _mac(key, "call", method, audience.encode()).hex()):
            raise Unauthenticated("the call's token is invalid", reason="CALLER_UNKNOWN")
        if not self._is_own(audience, CallerRole(role)):
            raise Unauthenticated(
                f"the call's token is for {audience}, which is not an address of this worker; it listens on port "
                f"{self._port} of {', '.join(sorted(self._hosts))}. Set --advertise-host to the host that other "
                "processes dial, and dial the port that the worker listens on",
                reason="CALLER_AUDIENCE",
            )
        if len(self._valid) >= _MAX_CACHED:
            self._valid.clear()
        return self._valid.setdefault((method, token), CallerRole(role))

    def proof(self, token: str, nonce: bytes) -> bytes:
        """Return this server's proof for the caller that made the valid `token`; empty without a nonce.

        Args:
            token: a token that `verify` has accepted.
            nonce: nonce of the caller; empty if it has none.
        """
        role, key_id, audience, _ = token.split(" ")
        return _mac(self._keys[role, key_id], "proof", audience, nonce) if nonce else b""

    def _is_own(self, audience: str, role: CallerRole) -> bool:
        host, _, port = audience.rpartition(":")
        if port != self._port:
            return False
        address = ip_of(host)
        if address is not None:
            return str(address) in self._hosts
        return host in self._names or (role is not CallerRole.WORKER and is_host(host))


def _mac(key: bytes, purpose: str, where: str, content: bytes) -> bytes:
    return blake3(b"\0".join((purpose.encode(), where.encode(), content)), key=key).digest()


def _key_id(key: bytes) -> str:
    return blake3(key).digest(length=_KEY_ID_BYTES).hex()
