"""API aggregation: the API server forwards calls to an API of the test, as it does for metrics of autoscalers."""

import base64
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.kube.certificates import Authority

pytestmark = pytest.mark.cluster

GROUP = "probe.tests.kvferry.dev"
SERVICE = "probe"


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers with the user that the front proxy authenticated."""

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "user": self.headers.get("X-Remote-User")}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def served(kube: Any, namespace: str, tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """An HTTPS server that accepts the front proxy only: its port, and the certificate of its CA."""
    authority = Authority.make("probe")
    authority.server([f"{SERVICE}.{namespace}.svc"], [], tmp_path / "probe")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "probe.crt", tmp_path / "probe.key")
    context.load_verify_locations(kube.cluster.folder / "pki" / "front-proxy-ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1], authority.pem
        server.shutdown()
        thread.join(10)


def test_calls_reach_the_server_with_the_name_of_the_user(kube: Any, namespace: str, served: tuple[int, bytes]) -> None:
    port, pem = served
    # Without a node, a Service's address has no endpoint, but an ExternalName outside the cluster works.
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE, "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": "v1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {"name": SERVICE, "namespace": namespace, "port": port},
            "caBundle": base64.b64encode(pem).decode(),
        },
    }
    kube.kubectl("apply", "-f", "-", input=json.dumps(service))
    kube.kubectl("apply", "-f", "-", input=json.dumps(api))
    try:
        kube.kubectl("wait", f"apiservice/v1.{GROUP}", "--for=condition=Available", "--timeout=30s")
        answer = json.loads(kube.kubectl("get", "--raw", f"/apis/{GROUP}/v1/anything"))
        assert answer == {"path": f"/apis/{GROUP}/v1/anything", "user": "admin"}
    finally:
        kube.kubectl("delete", f"apiservice/v1.{GROUP}")
