"""State of a pool's managed TLS, kept in the ConfigMap that the pods mount for the CA bundle. Pure.

The CAs' private keys are not stored here or anywhere else: a CA signs a pool's certificates once, and its key is then
discarded. The state therefore contains everything that a restarted operator needs.
"""

import re
from collections.abc import Mapping

import msgspec
from blake3 import blake3

from kvferry.core.process.struct_types import describe

CA_ENTRY = "ca.crt"
STATE_ENTRY = "state.json"
_MAX_CAS = 6
"""Maximum number of CAs in the bundle: the CA that signed, the newest CA, and earlier CAs that may have signed before
an operator was interrupted."""
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n?")


class TlsState(msgspec.Struct, frozen=True, rename="camel"):
    """CAs that pods trust, and what is known about the certificates in the pool's Secret. Times are wall-clock
    seconds."""

    bundle: tuple[str, ...] = ()
    """Certificates of the CAs in PEM format, newest last."""
    published_at: float = 0.0
    """Time when the newest CA was added to the bundle."""
    issuer: str = ""
    """Fingerprint of the CA that signed the certificates; empty before the first certificates."""
    issued_at: float = 0.0
    not_after: float = 0.0
    """End of the validity of the certificates."""
    secret_uid: str = ""
    """Uid of the Secret with the certificates and keys."""

    def published(self, certificate: str, now: float) -> "TlsState":
        """Return the state with a new CA in the bundle, which must reach all pods before it signs."""
        kept = [ca for ca in self.bundle if fingerprint(ca) == self.issuer]
        others = [ca for ca in self.bundle if ca not in kept][-(_MAX_CAS - 1 - len(kept)) :]
        return msgspec.structs.replace(self, bundle=(*kept, *others, certificate), published_at=now)

    def issued(self, now: float, not_after: float, secret_uid: str) -> "TlsState":
        """Return the state after the newest CA has signed the certificates in the Secret."""
        return msgspec.structs.replace(
            self, issuer=fingerprint(self.bundle[-1]), issued_at=now, not_after=not_after, secret_uid=secret_uid
        )

    def without_earlier(self) -> "TlsState":
        """Return the state with only the CA that signed the certificates."""
        left = tuple(ca for ca in self.bundle if fingerprint(ca) == self.issuer)
        return msgspec.structs.replace(self, bundle=left)


def fingerprint(certificate: str) -> str:
    """Return a digest of a PEM certificate, 32 hexadecimal digits."""
    return blake3(certificate.strip().encode()).hexdigest(16)


describe(TlsState)


def data_of(state: TlsState) -> dict[str, str]:
    """Return the entries of the ConfigMap."""
    rest = {name: value for name, value in msgspec.to_builtins(state).items() if name != "bundle"}
    return {CA_ENTRY: "".join(state.bundle), STATE_ENTRY: msgspec.json.encode(rest, order="sorted").decode()}


def read_state(data: Mapping[str, str]) -> TlsState | None:
    """Read a state from the entries of the ConfigMap; `None` if they do not contain a state."""
    try:
        state = msgspec.json.decode(data.get(STATE_ENTRY, ""), type=TlsState)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.structs.replace(state, bundle=tuple(_PEM.findall(data.get(CA_ENTRY, ""))))
