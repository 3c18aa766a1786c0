"""Runs prometheus-adapter, which serves metrics of a Prometheus to the autoscalers of a cluster."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.go_binary import go_binary

_BUILD = Path(__file__).parent / "adapter_build"
_PACKAGE = "sigs.k8s.io/prometheus-adapter/cmd/adapter"
_STOP_SECONDS = 20.0


def adapter_binary() -> Path:
    """Return the path of the adapter; build it if it is missing, which takes minutes."""
    return go_binary(_BUILD, "prometheus-adapter", _PACKAGE)


@contextmanager
def running_adapter(
    folder: Path, kubeconfig: Path, prometheus_url: str, rules: Path, certificate: Path
) -> Iterator[int]:
    """Run an adapter for the `with` block and yield its port on 127.0.0.1.

    Args:
        folder: an empty folder for its log.
        kubeconfig: kubeconfig of an administrator, for its checks of callers.
        prometheus_url: URL of the Prometheus.
        rules: file with its rules.
        certificate: path of its certificate and key, without the suffixes `.crt` and `.key`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(adapter_binary()),
        f"--config={rules}",
        f"--prometheus-url={prometheus_url}",
        "--metrics-relist-interval=2s",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={certificate}.crt",
        f"--tls-private-key-file={certificate}.key",
        *(f"--{use}-kubeconfig={kubeconfig}" for use in ("lister", "authentication", "authorization")),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield port
        except BaseException:
            print((folder / "log").read_text("utf-8", "replace")[-3000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_SECONDS)
