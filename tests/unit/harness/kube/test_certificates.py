"""The harness's certificates in a real handshake, and its waits for an API server."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.kube import certificates
from harness.kube.api import Api

from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers 403 twice, then with the phase."""

    seen: list[str] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        self.send_response(200 if len(self.seen) > 2 else 403)
        body = b'{"phase": "%s"}' % (b"Ready" if len(self.seen) > 3 else b"Pending")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Api]:
    certificates.make_all(tmp_path, {"127.0.0.1"})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "api.crt", tmp_path / "api.key")
    Answers.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield Api(f"https://127.0.0.1:{server.server_address[1]}", "word", tmp_path / "ca.crt", SystemClock())
        server.shutdown()
        thread.join(10)


def test_a_wait_ends_with_the_expected_answer(served: Api) -> None:
    served.wait("/x", lambda one: one["phase"] == "Ready", seconds=20, meanwhile=lambda: None)
    assert Answers.seen == ["Bearer word"] * 4


def test_a_wait_ends_with_the_error_of_meanwhile(served: Api) -> None:
    def over() -> None:
        raise Unavailable("it has ended")

    with pytest.raises(Unavailable, match="it has ended"):
        served.wait("/x", seconds=20, meanwhile=over)


def test_a_wait_that_fails_reports_the_last_answer(served: Api) -> None:
    with pytest.raises(Unavailable, match="/x is not as expected after 0 s; last: 403"):
        served.wait("/x", seconds=0, meanwhile=lambda: None)


def test_a_certificate_of_another_ca_is_not_trusted(served: Api, tmp_path: Path) -> None:
    stranger = certificates.Authority.make("stranger")
    (tmp_path / "stranger.crt").write_bytes(stranger.pem)
    wrong = Api(served.url, "word", tmp_path / "stranger.crt", SystemClock())
    with pytest.raises(OSError, match="certificate verify failed"):
        wrong.get("/x")
    assert Answers.seen == []


def test_key_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    certificates.make_all(tmp_path, {"127.0.0.1"})
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}
