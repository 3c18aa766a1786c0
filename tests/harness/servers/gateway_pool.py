"""Gateways as processes that share a worker and a Redis server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from harness.servers.processes import RunningProcess, a_worker, running
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import until

ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
SECONDS = 60.0


@dataclass
class GatewayPool:
    """A worker, Redis, and gateways that are started when they are needed."""

    worker: RunningProcess
    endpoint: str
    redis: RedisServer

    @contextmanager
    def gateway(self, state: str = "", *flags: str) -> Iterator[RunningProcess]:
        """Run a gateway that has a status of its worker."""
        url = state or f"redis://127.0.0.1:{self.redis.port}/0"
        with running(
            "gateway", "--model", "tiny", "--both", self.endpoint, "--state", url, *flags, *ADDRESSES
        ) as process:
            process.wait_for("listening")
            until(lambda: is_ready(process), "the gateway is ready")
            yield process


def http(process: RunningProcess) -> str:
    """Return the URL of a gateway's client API, without `/v1`."""
    return f"http://{process.events['listening']['http']}"


def is_ready(process: RunningProcess) -> bool:
    """Return whether a gateway would serve requests."""
    try:
        return httpx.get(f"{http(process)}/ready", timeout=SECONDS).status_code == 200
    except httpx.TransportError:
        return False


def metric(process: RunningProcess, name: str) -> float:
    """Return the value of a series of a gateway's metrics, 0 if it is absent."""
    for line in httpx.get(f"http://{process.events['listening']['admin']}/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    return 0.0


@contextmanager
def gateway_pool() -> Iterator[GatewayPool]:
    """Run a worker and a Redis server."""
    with a_worker("both") as worker, redis_server() as redis:
        listening = worker.events["listening"]
        endpoint = f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"
        yield GatewayPool(worker, endpoint, redis)
