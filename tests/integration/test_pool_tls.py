"""A pool with mutual TLS between its processes: the same tokens, other clients are refused, renewals under load."""

import os
import socket
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.idle import assert_workers_idle
from harness.servers.pool_certificates import PoolFolder, an_authority, tls_flags
from harness.servers.processes import RunningProcess, a_worker, running
from harness.servers.worker_channel import signer_of, worker_channel
from harness.waiting import until

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams
from kvferry.rpc.access.signed_channel import signed_blocking
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc

SECONDS = 60.0
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
PROMPTS = [[1 + (7 * i + j) % 200 for j in range(60 + i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def answers(address: str) -> list[tuple[int, ...]]:
    with Client(address, timeout=SECONDS) as client:
        return [tuple(client.complete(prompt, GREEDY)[0].token_ids) for prompt in PROMPTS]


def get(url: str) -> Any:
    return httpx.get(url, timeout=SECONDS)


def endpoint(worker: RunningProcess) -> str:
    listening = worker.events["listening"]
    return f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_a_stack_with_tls_gives_the_same_tokens_and_refuses_other_clients(connector: str, tmp_path: Path) -> None:
    engine = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--load-policy", "always", "--json")
    flags = ("up", *engine, "--connector", connector, *ADDRESSES)
    with running(*flags) as plain:
        expected = answers(str(plain.wait_for("ready")["grpc"]))
        assert plain.stop() == 0
    with running(*flags, "--pool-tls", "on", env={"TMPDIR": str(tmp_path)}) as stack:
        ready = stack.wait_for("ready")
        assert answers(str(ready["grpc"])) == expected
        metrics = get(f"http://{ready['admin']}/metrics").text
        assert 'kvferry_gateway_handoffs_total{outcome="fetched"} 0' not in metrics
        assert 'kvferry_tls_certificate_not_after_seconds{use="pool"}' in metrics
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder.glob("*.key")} == {
            "worker.key": 0,
            "gateway.key": 0,
        }
        workers = ready["workers"]
        assert isinstance(workers, dict)
        for port in worker_ports(stack, ready):
            assert_closed_to_strangers(f"127.0.0.1:{port}", has_grpc=port not in data_ports(workers, stack, ready))
        assert answers(str(ready["grpc"])) == expected
        assert stack.stop() == 0
    assert list(tmp_path.iterdir()) == [], "the folder with the run's keys was not removed"


def worker_ports(stack: RunningProcess, ready: Any) -> list[int]:
    """Return all ports on which the workers of a stack listen."""
    found = []
    for child in psutil.Process(stack.process.pid).children(recursive=True):
        if "worker" in child.cmdline():
            found += [c.laddr.port for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(found) >= 4
    return found


def data_ports(workers: dict[str, str], stack: RunningProcess, ready: Any) -> set[int]:
    """Return the workers' ports that are not gRPC: those of the connector, which TLS does not cover."""
    fleet = get(f"http://{ready['admin']}/fleet").json()
    known = {int(w["address"].rpartition(":")[2]) for w in fleet["workers"]}
    known |= {int(address.rpartition(":")[2]) for address in workers.values()}
    return set(worker_ports(stack, ready)) - known


def assert_closed_to_strangers(address: str, *, has_grpc: bool) -> None:
    """Check that callers without a certificate get no byte of an answer: without TLS, with TLS, and with a
    valid token.
    """
    host, port = address.split(":")
    signer = signer_of(CallerRole.OPERATOR)
    with grpc.insecure_channel(address) as channel:
        for call in (
            lambda: health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS),
            lambda: worker_admin_pb2_grpc.WorkerAdminStub(signed_blocking(channel, signer, address)).Status(
                worker_admin_pb2.StatusRequest(), timeout=SECONDS
            ),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    if not has_grpc:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        suppress(ssl.SSLError, ConnectionError),
        socket.create_connection((host, int(port)), SECONDS) as opened,
        context.wrap_socket(opened) as secured,
    ):
        assert secured.recv(1) == b""


@pytest.fixture
def folder(tmp_path: Path) -> PoolFolder:
    return PoolFolder(tmp_path, an_authority("first"))


def test_certificates_and_ca_are_renewed_while_streams_run(folder: PoolFolder) -> None:
    """All three stages of a CA rotation, each while earlier streams are running."""
    first, second = an_authority("first"), an_authority("second")
    folder.trust(first)
    worker_files, gateway_files = folder.issue("worker", first), folder.issue("gateway", first)
    outdated = PoolFolder(_made(folder.folder / "outdated"), first)
    prompt = PROMPTS[0]
    sampling = SamplingParams(temperature=0.0, max_tokens=1200, ignore_eos=True)
    flags = ("--connector", "tcp", "--metrics", "127.0.0.1:0", *tls_flags(worker_files), "--kv-memory", "64MiB")
    with (
        a_worker("prefill", *flags) as prefill,
        a_worker("decode", *flags) as decode,
        running(
            *("gateway", "--model", "tiny", "--prefill", endpoint(prefill), "--decode", endpoint(decode)),
            *(*ADDRESSES, *tls_flags(gateway_files)),
        ) as gateway,
        ThreadPoolExecutor(8) as pool,
    ):
        bound = gateway.wait_for("listening")
        admins = [str(worker.events["listening"]["admin"]) for worker in (prefill, decode)]
        until(lambda: get(f"http://{bound['http']}/ready").status_code == 200, "the gateway is ready")

        def complete(prompt: list[int]) -> tuple[int, ...]:
            with Client(str(bound["grpc"]), timeout=SECONDS) as client:
                return tuple(client.complete(prompt, sampling)[0].token_ids)

        expected = complete(prompt)

        def ends() -> list[str]:
            pages = [f"http://{bound['admin']}/metrics"]
            pages += [f"http://{worker.events['listening']['metrics']}/metrics" for worker in (prefill, decode)]
            lines = [line for page in pages for line in get(page).text.splitlines()]
            return [line for line in lines if line.startswith("kvferry_tls_certificate_not_after_seconds{")]

        streams = []
        for number, change in enumerate(
            (
                lambda: folder.trust(first, second),
                lambda: (folder.issue("worker", second, days=20), folder.issue("gateway", second, days=20)),
                lambda: folder.trust(second),
            )
        ):
            streams += [pool.submit(complete, prompt) for _ in range(2)]
            change()
            if number == 1:
                until(lambda: len(set(ends())) == 1 and len(ends()) == 3, "all use the new certificates")
            streams.append(pool.submit(complete, prompt))
            assert streams[-1].result(SECONDS) == expected
        assert [stream.result(SECONDS) for stream in streams] == [expected] * len(streams)
        metrics = get(f"http://{bound['admin']}/metrics").text
        assert "kvferry_gateway_resumes_total 0.0" in metrics
        assert "kvferry_gateway_retries_total{" not in metrics
        assert 'kvferry_gateway_streams_total{outcome="done"} 10.0' in metrics
        member = PoolTls(gateway_files, is_worker=False)
        assert_workers_idle(admins, tls=member)
        # Without the first CA in the bundle, its certificates are refused for new connections.

        def is_refused() -> bool:
            with worker_channel(admins[0], PoolTls(outdated.gateway, is_worker=False)) as channel:
                try:
                    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
                except grpc.RpcError as error:
                    return error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[no-any-return]
                return False

        until(is_refused, "the first CA is forgotten")
        for process in (gateway, decode, prefill):
            assert process.stop() == 0


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_worker_with_an_expired_certificate_is_named_in_the_fleet(folder: PoolFolder) -> None:
    authority = an_authority()
    folder.trust(authority)
    folder.issue("worker", authority, age_days=20)
    folder.issue("gateway", authority)
    files = folder.files("worker")
    pair = (files.key.read_bytes(), files.chain.read_bytes())
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        port = server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([pair], files.ca.read_bytes(), require_client_auth=True)
        )
        server.start()
        flags = ("gateway", "--model", "tiny", "--both", f"127.0.0.1:{port}", *ADDRESSES)
        with running(*flags, *tls_flags(folder.files("gateway"))) as gateway:
            url = f"http://{gateway.wait_for('listening')['admin']}/fleet"

            def why_not() -> str:
                (listed,) = get(url).json()["workers"]
                return str(listed["why_not"])

            until(lambda: "its certificate has expired" in why_not(), "the cause is in the fleet's report")
            assert gateway.stop() == 0
        server.stop(None).wait()


def test_probes_read_the_health_of_a_worker_with_tls_without_a_certificate(folder: PoolFolder) -> None:
    with a_worker("both", *tls_flags(folder.worker), "--health", "127.0.0.1:0") as worker:
        address = str(worker.events["listening"]["health"])
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "liveness"):
                request = health_pb2.HealthCheckRequest(service=service)
                assert stub.Check(request, timeout=SECONDS).status == health_pb2.HealthCheckResponse.SERVING
            admin = worker_admin_pb2_grpc.WorkerAdminStub(
                signed_blocking(channel, signer_of(CallerRole.OPERATOR), address)
            )
            with pytest.raises(grpc.RpcError) as caught:
                admin.Status(worker_admin_pb2.StatusRequest(), timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "this port serves health only"
        assert worker.stop() == 0


@pytest.mark.parametrize("command", [("worker", "--role", "both", "--model", "tiny"), ("gateway", "--both", "h:1")])
@pytest.mark.parametrize("given", [("cert",), ("cert", "key"), ("ca",)])
def test_missing_files_are_named_by_their_flags(
    command: tuple[str, ...], given: tuple[str, ...], folder: PoolFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--pool-tls-{name}-file={folder.worker.chain}" for name in given]
    with running(*command, *flags) as process:
        assert process.process.wait(SECONDS) == 2
    shown = capfd.readouterr().err
    for name in {"cert", "key", "ca"} - set(given):
        assert f"--pool-tls-{name}-file" in shown


def test_a_worker_with_an_expired_certificate_does_not_start(
    folder: PoolFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    authority = an_authority()
    folder.trust(authority)
    files = folder.issue("worker", authority, age_days=20)
    with running("worker", "--role", "both", "--model", "tiny", *tls_flags(files)) as process:
        assert process.process.wait(SECONDS) == 2
    shown = capfd.readouterr().err
    assert f"the certificate in {files.chain} has expired" in shown
    assert "Traceback" not in shown
    assert os.linesep + "-----BEGIN" not in shown
