"""Keys of gateways and stacks, made and read by the command line."""

import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from harness.servers.processes import a_worker, running
from harness.servers.worker_channel import TEST_KEYS
from harness.waiting import until

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.access.call_keys import CallSigner, role_key
from kvferry.rpc.access.signed_channel import signed_blocking
from kvferry.rpc.access.table import CallerRole
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

SECONDS = 60.0
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")


def printed(*arguments: str) -> str:
    """Run a command that ends at once and return its output."""
    with running(*arguments, env={"KVFERRY_TICKET_KEY": ""}) as process:
        assert process.process.stdout is not None
        output = process.process.stdout.read().decode()
        assert process.process.wait(SECONDS) == 0
    return output


def test_a_gateway_key_is_derived_from_the_ticket_key(tmp_path: Path) -> None:
    ticket_key = printed("key", "new")
    assert len(bytes.fromhex(ticket_key)) == 32
    assert printed("key", "new") != ticket_key
    file = tmp_path / "ticket.key"
    file.write_text(f"  {ticket_key.strip()}  \r\n\n" + "an older key of 16 bytes or more\n")
    for role in (CallerRole.GATEWAY, CallerRole.OPERATOR):
        derived = printed("key", role, "--ticket-key-file", str(file))
        assert bytes.fromhex(derived) == role_key(ticket_key.strip().encode(), role)


@pytest.mark.parametrize("given", ["", "short\n", "two words of a key\n", "x" * 513 + "\n"])
def test_invalid_api_keys_are_neither_hashed_nor_shown(given: str) -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "key", "hash"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    assert "16 to 512 characters" in done.stderr
    assert not given.strip() or given.strip() not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (("worker", "--role", "both", "--model", "tiny"), {"KVFERRY_TICKET_KEY": ""}, "kvferry key new"),
        (("gateway", "--model", "tiny", "--both", "127.0.0.1:1"), {"KVFERRY_GATEWAY_KEY": ""}, "kvferry key gateway"),
        (("gateway", "--model", "tiny", "--both", "127.0.0.1:1"), {"KVFERRY_GATEWAY_KEY": "x" * 64}, "64 hexadecimal"),
        (("key", "gateway"), {"KVFERRY_TICKET_KEY": ""}, "--ticket-key-file"),
        (("key", "gateway"), {"KVFERRY_TICKET_KEY": "short"}, "at least 16 bytes"),
        (("up", "--model", "tiny"), {"KVFERRY_TICKET_KEY": "ä" * 16}, "kvferry key new"),
        (("worker", "--role", "both", "--model", "tiny", "--advertise-host", "10.0.0.5:9100"), {}, "host name"),
    ],
)
def test_a_missing_or_malformed_key_is_named(
    arguments: tuple[str, ...], environment: dict[str, str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(*arguments, env=environment) as process:
        assert process.process.wait(SECONDS) == 2
    shown = capfd.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


def test_a_gateway_uses_only_workers_that_have_its_key() -> None:
    foreign = role_key(b"another pool's secret", CallerRole.GATEWAY).hex()
    with a_worker("both") as worker:
        listening = worker.events["listening"]
        endpoint = f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"
        flags = ("gateway", "--model", "tiny", "--both", endpoint, *ADDRESSES)
        for key, is_used in ((foreign, False), (TEST_KEYS["KVFERRY_GATEWAY_KEY"], True)):
            with running(*flags, env={"KVFERRY_GATEWAY_KEY": key}) as gateway:
                bound = gateway.wait_for("listening")
                answer = httpx.post(
                    f"http://{bound['http']}/v1/completions",
                    json={"model": "tiny", "prompt": "Hello", "max_tokens": 2},
                    timeout=SECONDS,
                )
                assert answer.status_code == (200 if is_used else 503), answer.text
                if not is_used:
                    fleet = httpx.get(f"http://{bound['admin']}/fleet", timeout=SECONDS).json()
                    (listed,) = fleet["workers"]
                    assert "kvferry key gateway" in listed["why_not"]
                assert gateway.stop() == 0


def test_a_gateway_uses_workers_of_old_and_new_keys_while_a_pool_changes_its_own(tmp_path: Path) -> None:
    new = b"the pool's next secret"
    file = tmp_path / "gateway.key"
    file.write_text(TEST_KEYS["KVFERRY_GATEWAY_KEY"])
    with a_worker("both") as old, a_worker("both", env={"KVFERRY_TICKET_KEY": new.decode()}) as fresh:
        endpoints: list[str] = []
        for worker in (old, fresh):
            listening = worker.events["listening"]
            endpoints += ["--both", f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"]
        flags = ("gateway", "--model", "tiny", *endpoints, *ADDRESSES, "--gateway-key-file", str(file))
        with running(*flags, env={"KVFERRY_GATEWAY_KEY": ""}) as gateway:
            url = f"http://{gateway.wait_for('listening')['admin']}/fleet"

            def number_used() -> int:
                return sum(worker["takes_work"] for worker in httpx.get(url, timeout=SECONDS).json()["workers"])

            until(lambda: number_used() == 1, "the worker with the first key is used")
            file.write_text(role_key(new, CallerRole.GATEWAY).hex())
            until(lambda: number_used() == 2, "both workers are used")
            assert gateway.stop() == 0


def test_a_stack_runs_under_a_given_key(tmp_path: Path) -> None:
    file = tmp_path / "ticket.key"
    file.write_text("a key for the whole stack\n")
    flags = ("up", "--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--json", *ADDRESSES)
    with running(*flags, "--ticket-key-file", str(file), env={"KVFERRY_TICKET_KEY": ""}) as stack:
        ready = stack.wait_for("ready")
        with Client(str(ready["grpc"]), timeout=SECONDS) as client:
            assert client.complete("Hello", SamplingParams(temperature=0.0, max_tokens=2))
        workers = ready["workers"]
        assert isinstance(workers, dict)
        address = workers["prefill-0"]
        signer = CallSigner(CallerRole.OPERATOR, role_key(b"a key for the whole stack", CallerRole.OPERATOR))
        with grpc.insecure_channel(address) as channel:
            stub = worker_admin_pb2_grpc.WorkerAdminStub(signed_blocking(channel, signer, address))
            assert stub.Status(worker_admin_pb2.StatusRequest(), timeout=SECONDS).ready
        assert stack.stop() == 0


def test_processes_that_read_prompts_inherit_no_secrets() -> None:
    secrets = {name: value for name, value in TEST_KEYS.items() if name != "KVFERRY_TICKET_KEY"}
    assert {"KVFERRY_GATEWAY_KEY", "KVFERRY_TENANT_KEY"} <= set(secrets)
    with running("gateway", "--model", "tiny", "--both", "127.0.0.1:1", *ADDRESSES, env=secrets) as gateway:
        url = f"http://{gateway.wait_for('listening')['http']}/v1/completions"
        body = {"prompt": "a", "response_format": {"type": "json_object"}}
        assert httpx.post(url, json=body, timeout=SECONDS).status_code == 503, "no worker; the constraint was checked"
        children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
        inherited = [Path(f"/proc/{child}/environ").read_bytes() for child in children]
        assert sum(b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children) >= 2
        assert not any(value.encode() in found for value in secrets.values() for found in inherited)
