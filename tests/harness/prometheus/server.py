"""Runs a Prometheus server that scrapes given addresses."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from harness.go_binary import go_binary
from kvferry.core.clock import SystemClock

SCRAPE_SECONDS = 1
_BUILD = Path(__file__).parent / "build"
_PACKAGE = "github.com/prometheus/prometheus/cmd/prometheus"
_BUILD_FLAGS = ("-tags", "remove_all_sd")
"""Flags that leave out the service discovery of clouds, which is most of the code; the tests scrape fixed addresses."""
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """An address to scrape."""

    address: str
    """`host:port`; metrics are at /metrics."""
    labels: Mapping[str, str]
    """Labels of its series."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **params: str) -> Any:
        """Call the HTTP API and return the member `data`; fail if the status is not success."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=30)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[Any]:
        """Evaluate a query now and return its series."""
        return list(self.get("query", query=expression)["result"])

    def wait_for(
        self, expression: str, seconds: float = 60.0, *, act: Callable[[], object] = lambda: None
    ) -> list[Any]:
        """Call `act` and evaluate a query until it has a series; fail after a time."""
        clock, pause = SystemClock(), threading.Event()
        deadline = clock.monotonic() + seconds
        while not (found := self.query(expression)):
            assert clock.monotonic() < deadline, f"{expression} has no series within {seconds} s"
            act()
            pause.wait(0.2)
        return found


def prometheus_binary() -> Path:
    """Return the path of Prometheus; build it if it is missing, which takes minutes."""
    return go_binary(_BUILD, "prometheus", _PACKAGE, *_BUILD_FLAGS)


@contextmanager
def running_prometheus(folder: Path, targets: Sequence[Target], rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Run a server for the `with` block.

    Args:
        folder: an empty folder for its configuration, data and log.
        targets: the addresses to scrape, every `SCRAPE_SECONDS`.
        rules: files of recording and alerting rules.
    """
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [
            {
                "job_name": "kvferry",
                "static_configs": [{"targets": [one.address], "labels": dict(one.labels)} for one in targets],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        str(prometheus_binary()),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            _wait_ready(process, address, folder / "log")
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_SECONDS)


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + _START_SECONDS
    while process.poll() is None and clock.monotonic() < deadline:
        try:
            if httpx.get(f"http://{address}/-/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        pause.wait(0.1)
    raise AssertionError(f"prometheus is not ready: {log.read_text('utf-8', 'replace')[-2000:]}")
