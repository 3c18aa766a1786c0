"""`python -m harness.prometheus`: builds Prometheus and its adapter, and prints their paths. The first time takes
minutes, and tests have time limits."""

from harness.prometheus.metrics_adapter import adapter_binary
from harness.prometheus.server import prometheus_binary

if __name__ == "__main__":
    print(prometheus_binary(), flush=True)
    print(adapter_binary(), flush=True)
