"""The condition `CertificatesValid`: how long a pool's certificates are valid. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime

from kvferry.operator.plan.conditions.condition_state import ConditionState
from kvferry.operator.pool.spec import Json

_EXPIRING_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class TlsSeen:
    """Observed certificates of a pool. Times are wall-clock seconds."""

    mode: str
    """`Managed` or `Secret`."""
    not_after: float
    """End of the validity of the certificates; 0 if it is not known yet."""
    now: float
    num_cas: int = 1
    """Number of CAs that pods trust; more than one during a renewal."""

    def status(self) -> Json:
        """Return the pool's `status.tls`."""
        return {"mode": self.mode, **({"notAfter": _date(self.not_after)} if self.not_after else {})}


def certificates_condition(tls: TlsSeen | None) -> ConditionState | None:
    """Return whether the pool's certificates are valid for at least another week; `None` without TLS."""
    if tls is None:
        return None
    if not tls.not_after:
        return "Unknown", "NotReportedYet", "the gateway has not reported its certificate yet"
    left = tls.not_after - tls.now
    if left > _EXPIRING_SECONDS:
        renewal = "; a renewal is in progress" if tls.num_cas > 1 else ""
        return (
            "True",
            "Valid",
            f"calls between pods use TLS; certificates are valid until {_date(tls.not_after)}{renewal}",
        )
    remedy = (
        "the operator renews them 30 days before they expire; see its log"
        if tls.mode == "Managed"
        else "write renewed certificates to the Secret spec.tls.secretName; pods read them without a restart"
    )
    if left <= 0:
        return "False", "Expired", f"certificates expired on {_date(tls.not_after)}, and new connections fail; {remedy}"
    return "False", "Expiring", f"certificates expire on {_date(tls.not_after)}; {remedy}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
