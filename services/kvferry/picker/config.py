"""Settings of one picker process, built by the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.gateway.decide.config import PoolName
from kvferry.picker.decide.choice import ChoiceConfig
from kvferry.picker.decide.endpoints import PoolEndpoint
from kvferry.picker.decide.engine_metrics import AUTO
from kvferry.picker.decide.exchange import BodyMode
from kvferry.picker.decide.headers import PREFILL_HEADER
from kvferry.picker.decide.saturation import SaturationConfig

SCRAPES_PER_SECOND = 500
"""Maximum rate of scrapes of one picker, which bounds their share of a processor."""


@dataclass(frozen=True, slots=True)
class ScrapeConfig:
    """Settings of the scrapes."""

    flavor: str = AUTO
    path: str = "/metrics"
    port: int = 0
    """Port of the metrics of endpoints that Kubernetes lists; 0: that of requests."""
    seconds: float = 0.2
    """Interval between two scrapes of an endpoint."""
    stale_seconds: float = 10.0

    def interval(self, num_endpoints: int) -> float:
        """Return the interval for a number of endpoints in seconds."""
        return max(self.seconds, num_endpoints / SCRAPES_PER_SECOND)


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """All settings of a picker."""

    listen: str = "127.0.0.1:0"
    health: str = ""
    """`host:port` of health without TLS; empty for none."""
    metrics: str = ""
    """`host:port` of Prometheus metrics; empty for none."""
    endpoints: Sequence[PoolEndpoint] = ()
    pool: PoolName | None = None
    """Pool of Kubernetes whose pods are the endpoints; `None` for `endpoints`."""
    scrape: ScrapeConfig = ScrapeConfig()
    choice: ChoiceConfig = ChoiceConfig()  # noqa: RUF009  frozen
    saturation: SaturationConfig = SaturationConfig()  # noqa: RUF009  frozen
    body_mode: BodyMode | None = None
    """How the proxy sends bodies; `None`: as it says."""
    max_body_bytes: int = 1 << 20
    prefill_header: str = PREFILL_HEADER
    tls: tuple[Path, Path] | None = None
    """Certificate chain and key; `None` for a self-signed certificate."""
    is_plaintext: bool = False
    shares_port: bool = False
    drain_seconds: float = 30.0
