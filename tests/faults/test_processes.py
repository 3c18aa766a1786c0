"""Processes killed or terminated at the worst moment: no request is lost, and no resource leaks."""

import json
import os
import signal
import socket
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, running
from harness.servers.worker_channel import worker_channel
from harness.waiting import until

from kvferry.client import Client
from kvferry.core.errors import Unauthenticated
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

SECONDS = 60.0
FLAGS = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB", "--load-policy", "always")
ADDRESSES = ("--log-level", "error", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
LONG = SamplingParams(temperature=0.0, max_tokens=1200, ignore_eos=True)
# On a loaded machine a worker may have sent its last token before this process reads the twentieth. The fault then
# interrupts no stream, and is repeated with another request.
ATTEMPTS = 10


@contextmanager
def a_stack(*flags: str) -> Iterator[RunningProcess]:
    with running("up", *FLAGS, *ADDRESSES, *flags) as process:
        process.wait_for("ready")
        yield process


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvferry" in name}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The tokens of LONG after the prompt, from one engine."""
    return list(LLM("tiny", dtype="float32", kv_memory=16 << 20).generate([PROMPT], LONG)[0].token_ids)


PROMPT = [(13 * i) % 200 for i in range(50)]


def test_up_with_api_keys_starts_and_serves_their_owners(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# key tenant\nsecret-1 acme\n")
    with a_stack("--both", "1", "--prefill", "0", "--decode", "0", "--api-keys-file", str(keys)) as process:
        address = str(process.events["ready"]["grpc"])
        with Client(address, timeout=SECONDS, api_key="secret-1") as client:
            assert client.complete("Hello", SamplingParams(temperature=0.0, max_tokens=2))
        with Client(address, timeout=SECONDS) as client, pytest.raises(Unauthenticated):
            client.complete("Hello", SamplingParams(temperature=0.0, max_tokens=2))


def stream(client: Client, fault: Callable[[], None]) -> tuple[list[int], int]:
    """Generate LONG and call `fault` at each chunk from the twentieth token on.

    Returns:
        The token ids, and the number of times that the gateway resumed the stream on another worker.
    """
    tokens: list[int] = []
    resumed = 0
    for chunk in client.generate(PROMPT, LONG):
        tokens += [t.token_id for t in chunk.tokens]
        if len(tokens) >= 20:
            fault()
        if chunk.timing is not None:
            resumed = chunk.timing.resumed
    return tokens, resumed


def test_a_killed_prefill_worker_costs_no_request_and_is_restarted(expected: list[int]) -> None:
    with a_stack() as process, Client(str(process.events["ready"]["grpc"]), timeout=SECONDS) as client:
        victim = process.children("prefill")[0]
        assert stream(client, partial(kill, victim)) == (expected, 0)
        and_works_as_before(process, client, "prefill", victim.pid, expected)


def test_a_killed_decode_worker_costs_no_request_and_is_restarted(expected: list[int]) -> None:
    with a_stack() as process, Client(str(process.events["ready"]["grpc"]), timeout=SECONDS) as client:
        for _ in range(ATTEMPTS):
            victim = process.children("decode")[0]
            tokens, resumed = stream(client, partial(kill, victim))
            assert tokens == expected
            until(partial(serves_with_new, process, "decode", victim.pid), "a new decode worker that serves")
            if resumed:
                break
        assert resumed == 1
        and_works_as_before(process, client, "decode", victim.pid, expected)


def kill(victim: psutil.Process) -> None:
    """Kill a process, unless it is dead already."""
    if victim.is_running():
        victim.kill()
        victim.wait(SECONDS)


def and_works_as_before(process: RunningProcess, client: Client, role: str, old: int, expected: list[int]) -> None:
    """Check that a new worker replaced process `old`, that the next request is served, and that no resource is held."""
    until(partial(serves_with_new, process, role, old), f"a new {role} worker that serves")
    (again,) = client.complete(PROMPT, LONG)
    assert again.token_ids == expected
    admin = process.events["ready"]["workers"]
    assert isinstance(admin, dict)
    assert_workers_idle(admin.values())
    assert process.stop() == 0


def child_is_new(process: RunningProcess, role: str, old: int) -> bool:
    try:
        return any(child.pid != old for child in process.children(role))
    except psutil.NoSuchProcess:
        return False


def serves_with_new(process: RunningProcess, role: str, old: int) -> bool:
    """Return whether a new worker has replaced process `old` and the gateway is ready: a request waits only for a
    moment for a worker that is still starting."""
    if not child_is_new(process, role, old):
        return False
    try:
        with urllib.request.urlopen(f"http://{process.events['ready']['http']}/ready", timeout=SECONDS) as answer:
            return bool(json.loads(answer.read())["ready"])
    except urllib.error.URLError:
        return False


@pytest.mark.parametrize("connector", ["shm", "nixl", "memory"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_after_the_parent_ends(number: signal.Signals, connector: str) -> None:
    before = shared_memory()
    with a_stack("--connector", connector) as process:
        parent = psutil.Process(process.process.pid)
        children = parent.children(recursive=True)  # includes the gateway's text process
        assert len(parent.children()) == (2 if connector == "memory" else 3)
        status = process.stop(number)
        assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        gone, alive = psutil.wait_procs(children, timeout=SECONDS)
        assert not alive
        assert len(gone) == len(children)
        assert shared_memory() <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_end_during_the_start_leaves_nothing(number: signal.Signals) -> None:
    with running("up", *FLAGS, *ADDRESSES) as process:
        parent = psutil.Process(process.process.pid)
        until(lambda: len(parent.children()) >= 2, "workers are starting")
        children = parent.children(recursive=True)
        process.stop(number)
        assert not psutil.wait_procs(children, timeout=SECONDS)[1]


def test_a_running_stream_is_finished_before_the_stack_ends(expected: list[int]) -> None:
    with a_stack() as process, Client(str(process.events["ready"]["grpc"]), timeout=SECONDS) as client:
        tokens: list[int] = []
        for chunk in client.generate(PROMPT, LONG):
            if not tokens:
                process.process.send_signal(signal.SIGTERM)
            tokens += [t.token_id for t in chunk.tokens]
        assert tokens == expected
        assert process.process.wait(SECONDS) == 0


def test_a_frozen_prefill_worker_does_not_hang_a_request(expected: list[int]) -> None:
    """A frozen process answers no call and closes no connection, like a lost node."""
    with (
        a_stack("--connector", "nixl") as process,
        Client(str(process.events["ready"]["grpc"]), timeout=SECONDS) as client,
    ):
        victim = process.children("prefill")[0]
        tokens: list[int] = []
        for chunk in client.generate(PROMPT, LONG):
            if not tokens:
                victim.suspend()  # right after the first token, so the hand-off gets no answer
            tokens += [t.token_id for t in chunk.tokens]
        victim.resume()
        assert tokens == expected


def is_running_a_sequence(stack: RunningProcess, worker: psutil.Process) -> bool:
    """Return whether the decode worker in this process has a sequence in its batch."""
    admin = stack.events["ready"]["workers"]
    assert isinstance(admin, dict)
    ports = {c.laddr.port for c in worker.net_connections() if c.status == psutil.CONN_LISTEN}
    (address,) = [a for a in map(str, admin.values()) if int(a.rpartition(":")[2]) in ports]
    with worker_channel(address) as channel:
        status = worker_admin_pb2_grpc.WorkerAdminStub(channel).Status(worker_admin_pb2.StatusRequest(), timeout=10)
    return status.load.running > 0


def freeze_the_busy(process: RunningProcess, workers: list[psutil.Process], frozen: list[psutil.Process]) -> None:
    """Suspend the worker that runs a sequence, once, and add it to `frozen`."""
    if not frozen:
        frozen += [worker for worker in workers if is_running_a_sequence(process, worker)]
        for worker in frozen:
            worker.suspend()


def test_a_frozen_decode_worker_does_not_hang_its_stream(expected: list[int]) -> None:
    """The gateway gives up its calls to a worker that is silent for a time, and continues on another worker."""
    with (
        a_stack("--decode", "2") as process,
        Client(str(process.events["ready"]["grpc"]), timeout=SECONDS) as client,
    ):
        workers = process.children("decode")
        assert len(workers) == 2
        for _ in range(ATTEMPTS):
            frozen: list[psutil.Process] = []
            tokens, resumed = stream(client, partial(freeze_the_busy, process, workers, frozen))
            for worker in frozen:
                worker.resume()
            assert tokens == expected
            if resumed:
                break
        assert resumed == 1
        admin = process.events["ready"]["workers"]
        assert isinstance(admin, dict)
        assert_workers_idle(admin.values(), within_seconds=SECONDS)
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--connector", "pigeon"), "not one of 'memory', 'nixl', 'shm', 'tcp'"),
        (("up", "--prefill", "0"), "cannot serve requests"),
        (("up", "--model", "no-such-model"), "model 'no-such-model' is not a known name"),
        (("up", "--tier", "pigeon://x"), "unknown tier"),
        (("up", "--kv-memory", "lots"), "unknown unit"),
        (("worker", "--role", "both", "--model", "tiny", "--kv-memory", "64KiB"), "a server needs 1,024"),
        (("worker", "--role", "prefill"), "ticket key"),
        (("worker", "--role", "decode", "--connector", "memory"), "within one process"),
        (("worker", "--connector", "nixl", "--kv-encryption"), "'nixl' does not encrypt KV; use connector 'tcp'"),
        (("up", "--model", "tiny", "--connector", "nixl", "--kv-encryption"), "'nixl' does not encrypt KV"),
        (("worker", "--model", "README.md"), "is not a known name"),
        (("gateway", "--both", "nowhere"), "host:port"),
        (("model", "inspect", "no-such-model"), "is not a known name"),
        (("up", "--config", "missing.toml"), "cannot read the settings file"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    arguments: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(*arguments, env={"KVFERRY_TICKET_KEY": ""} if says == "ticket key" else None) as process:
        assert process.process.wait(SECONDS) in {1, 2}
    shown = capfd.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("variable", ["UCX_NET_DEVICES", "UCX_TLS"])
def test_nixl_without_a_usable_device_names_the_variables(variable: str, capfd: pytest.CaptureFixture[str]) -> None:
    worker = ("worker", "--role", "both", "--model", "tiny", "--connector", "nixl", "--listen", "127.0.0.1:0")
    with running(*worker, env={variable: "nosuch0"}) as process:
        assert process.process.wait(SECONDS) == 2
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("kvferry")]
    assert f"{variable}=nosuch0" in said
    assert {"UCX_NET_DEVICES", "UCX_TLS"} <= set(said.replace("=", " ").split())


def test_a_damaged_model_ends_the_start_with_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with running("up", *ADDRESSES, "--model", str(tmp_path / "cut.gguf")) as process:
        assert process.process.wait(SECONDS) == 2
    shown = capfd.readouterr().err
    assert "cut.gguf" in shown
    assert "cannot start" in shown
    assert "Traceback" not in shown


def test_an_error_of_all_workers_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.gguf"
    with running("up", *ADDRESSES, "--model", str(missing), "--prefill", "2", "--decode", "2") as process:
        assert process.process.wait(SECONDS) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"cannot start: cannot open {missing}: No such file or directory")


def test_lines_of_a_stack_name_the_process_and_what_it_serves(capfd: pytest.CaptureFixture[str]) -> None:
    with a_stack("--log-level", "info") as process:
        assert process.stop() == 0
    lines = capfd.readouterr().err.splitlines()
    assert all(line.partition(": ")[0] in {"prefill-0", "decode-0", "gateway"} for line in lines)
    for role in ("prefill", "decode"):
        (line,) = [one for one in lines if one.startswith(f"{role}-0: ") and "KV pages" in one]
        assert f": {role}, " in line
        assert " MiB), loaded in " in line
    assert not any("uvicorn" in line for line in lines)


def test_a_taken_port_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with a_stack() as process:
        taken = str(process.events["ready"]["http"])
        with running("gateway", "--model", "tiny", "--http", taken, "--grpc", "127.0.0.1:0") as second:
            assert second.process.wait(SECONDS) == 2
        assert taken in capfd.readouterr().err
        assert process.stop() == 0


def test_all_taken_ports_are_named_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc:
        taken = {flag: f"127.0.0.1:{one.getsockname()[1]}" for flag, one in (("--http", http), ("--grpc", grpc))}
        arguments = [part for pair in taken.items() for part in pair]
        with running("up", "--model", "tiny", *arguments) as process:
            assert process.process.wait(SECONDS) == 2
    shown = capfd.readouterr().err
    for flag, address in taken.items():
        assert f"cannot listen on {address} ({flag})" in shown
    assert "see below" not in shown, "an address that is chosen is announced only if the stack starts"


def test_the_settings_are_shown_with_their_sources(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "k.toml").write_text("decode = 3\n")
    arguments = ("up", "--config", str(tmp_path / "k.toml"), "--connector", "nixl", "--print-config")
    with running(*arguments, env={"KVFERRY_PREFILL": "2"}) as process:
        output = process.process.stdout
        assert output is not None
        shown = output.read().decode()
        assert process.process.wait(SECONDS) == 0
    assert tomllib.loads(shown) == {"prefill": 2, "decode": 3, "connector": "nixl"}
    rows = {line.split()[0]: line.rpartition("  # ")[2] for line in shown.splitlines() if " = " in line}
    assert rows["prefill"] == "from KVFERRY_PREFILL"
    assert rows["decode"] == f"from {tmp_path / 'k.toml'}"
    assert rows["connector"] == "from --connector"
    assert '# both = "auto" ' in shown
