"""A gateway of two processes: both serve, one that exits is restarted, and a signal drains both."""

import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest
from harness.servers.processes import RunningProcess, a_worker, running
from harness.waiting import until

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams

ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
SECONDS = 60.0


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with a_worker("both") as both:
        listening = both.events["listening"]
        yield f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"


@pytest.fixture
def gateway(worker: str) -> Iterator[RunningProcess]:
    with running("gateway", "--model", "tiny", "--both", worker, "--processes", "2", *ADDRESSES) as process:
        listening = process.wait_for("listening")
        for admin in listening["admins"]:  # type: ignore[attr-defined]
            until(lambda admin=admin: takes_work(admin), "the process has a status of its worker")  # type: ignore[misc]
        yield process


def takes_work(admin: str) -> bool:
    try:
        workers = httpx.get(f"http://{admin}/fleet").json()["workers"]
    except httpx.TransportError:
        return False
    return bool(workers) and all(worker["takes_work"] for worker in workers)


def served(admin: str) -> float:
    """Return the number of completions that a process has answered with 200."""
    for line in httpx.get(f"http://{admin}/metrics").text.splitlines():
        if line.startswith("kvferry_gateway_requests_total") and "/v1/completions" in line and 'status="200"' in line:
            return float(line.rpartition(" ")[2])
    return 0.0


def ask(http: str) -> None:
    """Send a request over a connection of its own."""
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"http://{http}/v1/completions", json=body, timeout=SECONDS).status_code == 200


def test_both_processes_serve_the_same_ports(gateway: RunningProcess) -> None:
    listening = gateway.wait_for("listening")
    http, admins = str(listening["http"]), list(listening["admins"])  # type: ignore[call-overload]
    assert len(set(admins)) == 2
    assert listening["admin"] == admins[0]
    for _ in range(40):  # the kernel chooses a process for each connection
        ask(http)
    counts = [served(admin) for admin in admins]
    assert sum(counts) == 40
    assert min(counts) > 0
    for _ in range(4):
        with Client(str(listening["grpc"])) as client:
            assert client.complete("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
    body = {"input": "a", "previous_response_id": "resp_1"}
    refused = httpx.post(f"http://{http}/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


def test_a_process_that_dies_is_replaced_at_its_admin_address(gateway: RunningProcess) -> None:
    listening = gateway.wait_for("listening")
    http, admins = str(listening["http"]), list(listening["admins"])  # type: ignore[call-overload]
    first = children(gateway)
    assert len(first) == 2
    first[0].kill()
    first[0].wait(SECONDS)
    for _ in range(10):  # the other process serves
        ask(http)
    until(lambda: len(children(gateway)) == 2 and all(map(takes_work, admins)), "there are two processes again")
    assert {child.pid for child in children(gateway)} > {first[1].pid}
    ask(http)


def children(gateway: RunningProcess) -> list[psutil.Process]:
    """Return the gateway's child processes. Each of them has child processes for text."""
    return psutil.Process(gateway.process.pid).children()


def test_a_signal_drains_both(gateway: RunningProcess) -> None:
    listening = gateway.wait_for("listening")
    url = f"http://{listening['http']}/v1/completions"
    begun, ends = [threading.Event() for _ in range(8)], []

    def read(number: int) -> None:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
            lines = []
            for line in answer.iter_lines():
                begun[number].set()
                lines.append(line)
            ends.append([line for line in lines if line][-1])

    readers = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for reader in readers:
        reader.start()
    for event in begun:
        assert event.wait(SECONDS)
    assert gateway.stop() == 0
    for reader in readers:
        reader.join(SECONDS)
    assert ends == ["data: [DONE]"] * 8
    with pytest.raises(httpx.TransportError):
        httpx.post(url, json={"prompt": "a"})
