"""All metrics, for documents and tests."""

from kvferry.core.metrics import (
    gateway_metrics,
    operator_metrics,
    picker_metrics,
    tls_metrics,
    vllm_metrics,
    worker_metrics,
)
from kvferry.core.metrics.metric import Metric

_MODULES = (gateway_metrics, picker_metrics, worker_metrics, operator_metrics, vllm_metrics, tls_metrics)
ALL: tuple[Metric, ...] = tuple(
    value for module in _MODULES for name, value in vars(module).items() if isinstance(value, Metric) and name.isupper()
)
