"""`kvferry explain` with servers that are no gateway, and with an API key from a file."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.commands.explain import command

Answer = tuple[int, bytes]


class Server(HTTPServer):
    """Answers each request with the same status and body, and keeps its headers."""

    def __init__(self, status: int, body: bytes) -> None:
        self.answer, self.keys = (status, body), list[str]()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, body = self.server.answer
        self.server.keys.append(self.headers.get("authorization", ""))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(*request.param) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


ERROR = json.dumps({"error": {"message": "no ended request has this id", "type": "x"}}).encode()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ((404, ERROR), "no ended request has this id"),
        ((502, b"<html>Bad Gateway</html>"), "answers with status 502; set --url to the gateway"),
        ((500, b'["error"]'), "answers with status 500"),
        ((404, b'{"error": "not found"}'), "answers with status 404"),
        ((200, b"<html>Welcome</html>"), "does not answer"),
    ],
    indirect=["server"],
)
def test_each_answer_that_is_no_report_is_one_line(server: Server, message: str) -> None:
    done = CliRunner().invoke(command, ["req-1", "--url", f"127.0.0.1:{server.server_port}"])
    assert done.exit_code
    assert message in str(done.exception) + done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("server", [(404, ERROR)], indirect=True)
def test_the_api_key_comes_from_its_file(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(0o600)
    url = f"http://127.0.0.1:{server.server_port}/v1"
    CliRunner().invoke(command, ["req-1", "--url", url, "--api-key-file", str(file)])
    assert server.keys == ["Bearer secret"]
