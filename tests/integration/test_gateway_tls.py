"""A gateway with a certificate: HTTP and gRPC by it, and by a renewed one without a restart."""

import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.servers.processes import running

from kvferry.core.errors import UsageError
from kvferry.gateway.http.tls import Certificate


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, over the one that was there."""
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
            asked = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING  # its only worker is not there
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
