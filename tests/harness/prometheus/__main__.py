"""`python -m harness.prometheus`: builds Prometheus and its adapter, which takes minutes the first time, and prints their
paths; tests have a time limit of their own."""

from harness.prometheus.metrics_adapter import adapter_binary
from harness.prometheus.server import prometheus_binary

if __name__ == "__main__":
    print(prometheus_binary(), flush=True)
    print(adapter_binary(), flush=True)
