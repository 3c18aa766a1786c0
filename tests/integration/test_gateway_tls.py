"""A gateway with a certificate: it serves HTTP and gRPC with TLS, and uses renewed certificates without a restart."""

import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.servers.pool_certificates import DAY, NOW, an_authority
from harness.servers.processes import running
from harness.waiting import until

from kvferry.client import AsyncClient, Client, ClientTls
from kvferry.core.errors import Unavailable, UsageError
from kvferry.gateway.http.server.tls import Certificate
from kvferry.rpc.tls.authority import Authority


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a self-signed certificate for localhost, replacing the previous one."""
    chain, key = folder / "tls.crt", folder / "tls.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(chain)],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain, key


def test_both_apis_are_served_by_tls(tmp_path):
    chain, key = make(tmp_path, "first")
    flags = ["--model", "tiny", "--both", "127.0.0.1:1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with running("gateway", *flags, "--tls-cert-file", str(chain), "--tls-key-file", str(key)) as gateway:
        listening = gateway.wait_for("listening")
        http = f"https://{listening['http']}/health"
        assert httpx.get(http, verify=ssl.create_default_context(cafile=chain)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(http.replace("https", "http"))
        credentials = grpc.ssl_channel_credentials(chain.read_bytes())
        with grpc.secure_channel(str(listening["grpc"]), credentials) as channel:
            health_request = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(health_request, timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING  # the gateway's only worker does not exist
        assert gateway.stop() == 0


def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(tmp_path):
    certificate = Certificate(*make(tmp_path, "first"))
    assert not certificate.renew()
    make(tmp_path, "second")
    assert certificate.renew()
    assert not certificate.renew()
    certificate.key.write_text("no key")
    assert not certificate.renew()
    make(tmp_path, "third")
    assert certificate.renew()


def test_files_that_are_no_certificate_are_named(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(UsageError, match="cannot load"):
        Certificate(tmp_path / "a", tmp_path / "a")


def test_a_certificate_without_its_key_is_refused():
    with running("gateway", "--both", "127.0.0.1:1", "--tls-cert-file", "x") as gateway:
        assert gateway.process.wait(30) == 2


def client_files(folder: Path, authority: Authority) -> tuple[Path, Path]:
    """Return a client's certificate and key files."""
    folder.mkdir()
    signed = authority.sign("client.example", NOW, 5)
    (folder / "client.crt").write_text(signed.certificate)
    (folder / "client.key").write_text(signed.key)
    return folder / "client.crt", folder / "client.key"


def test_clients_need_a_certificate_of_their_ca_which_can_be_replaced(tmp_path):
    chain, key = make(tmp_path, "server")
    first, second = an_authority("first"), an_authority("second")
    client_ca = tmp_path / "clients.crt"
    client_ca.write_text(first.certificate)
    known, later = client_files(tmp_path / "known", first), client_files(tmp_path / "later", second)
    flags = ["--model", "tiny", "--both", "127.0.0.1:1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    tls = ["--tls-cert-file", str(chain), "--tls-key-file", str(key), "--tls-client-ca-file", str(client_ca)]

    def http(files: tuple[Path, Path] | None) -> bool:
        context = ssl.create_default_context(cafile=chain)
        if files is not None:
            context.load_cert_chain(*files)
        try:
            return httpx.get(f"https://{listening['http']}/health", verify=context).status_code == 200
        except httpx.TransportError:
            return False

    def call(files: tuple[Path, Path] | None) -> bool:
        pair = (None, None) if files is None else (files[1].read_bytes(), files[0].read_bytes())
        credentials = grpc.ssl_channel_credentials(chain.read_bytes(), *pair)
        with grpc.secure_channel(str(listening["grpc"]), credentials) as channel:
            call = health_pb2_grpc.HealthStub(channel).Check.with_call
            with suppress(grpc.RpcError):
                return call(health_pb2.HealthCheckRequest(), timeout=10)[1].code() is grpc.StatusCode.OK
            return False

    with running("gateway", *flags, *tls) as gateway:
        listening = gateway.wait_for("listening")
        for request in (http, call):
            assert [request(files) for files in (known, later, None)] == [True, False, False]
        client_ca.write_text(second.certificate)
        until(lambda: http(later), "the new CA of clients is read")
        for request in (http, call):
            assert [request(files) for files in (known, later, None)] == [False, True, False]
        assert gateway.stop() == 0


async def test_the_clients_of_the_package_use_tls(tmp_path):
    """The clients connect with their own certificate to a server whose certificate only the given CA makes trusted."""
    chain, key = make(tmp_path, "server")
    authority = an_authority()
    (tmp_path / "clients.crt").write_text(authority.certificate)
    own = client_files(tmp_path / "known", authority)
    flags = ["--model", "tiny", "--both", "127.0.0.1:1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    tls = ["--tls-cert-file", str(chain), "--tls-key-file", str(key), "--tls-client-ca-file", f"{tmp_path}/clients.crt"]
    with running("gateway", *flags, *tls) as gateway:
        address = str(gateway.wait_for("listening")["grpc"])
        files = ClientTls(chain, *own)
        with Client(address, timeout=20, tls=files) as blocking:
            assert blocking.tokenize("Hello")
        async with AsyncClient(address, timeout=20, tls=files) as client:
            assert await client.tokenize("Hello")
        for stranger in (None, ClientTls(chain), ClientTls()):
            with Client(address, timeout=20, tls=stranger) as blocking, pytest.raises(Unavailable):
                blocking.tokenize("Hello")
        assert gateway.stop() == 0
    with pytest.raises(UsageError, match="set key_file too"):
        Client("127.0.0.1:1", tls=ClientTls(cert_file="x"))
    with pytest.raises(UsageError, match="cannot read"):
        Client("127.0.0.1:1", tls=ClientTls(ca_file=tmp_path / "missing"))


def test_a_ca_of_clients_without_a_certificate_is_refused(capfd):
    with running("gateway", "--both", "127.0.0.1:1", "--tls-client-ca-file", "x") as gateway:
        assert gateway.process.wait(30) == 2
    assert "--tls-cert-file" in capfd.readouterr().err


def test_an_expired_certificate_is_refused(tmp_path):
    signed = an_authority().sign("gateway.example", NOW - 30 * DAY, 10)
    (tmp_path / "a.crt").write_text(signed.certificate)
    (tmp_path / "a.key").write_text(signed.key)
    with pytest.raises(UsageError, match="has expired"):
        Certificate(tmp_path / "a.crt", tmp_path / "a.key")
