"""Settings of the operator's process."""

from dataclasses import dataclass, field

from kvferry.operator.plan.process.lease import LeaseTimes
from kvferry.operator.plan.template_policy import TemplatePolicy

LEASE = "kvferry-operator"


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Settings of an operator process."""

    default_image: str
    """Image for pools without `spec.image`."""
    template_policy: TemplatePolicy = TemplatePolicy.ANY
    """What the templates of pools may contain."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose pools are reconciled; all namespaces if empty."""
    own_namespace: str = "default"
    """Namespace of the Lease for leader election."""
    lease_name: str = LEASE
    identity: str = ""
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    health_address: str = "0.0.0.0:8080"
    watch_probe_seconds: float = 10.0
    discovery_seconds: float = 30.0
    """Interval between discoveries of optional kinds in seconds."""
    workers: int = 4
    """Maximum number of pools reconciled in parallel."""

    @property
    def lease_id(self) -> str:
        """Namespace and name of the Lease, which identify an operator with all its replicas."""
        return f"{self.own_namespace}/{self.lease_name}"
