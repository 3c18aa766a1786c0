"""OpenAI's own packages for Go and Node against a running stack with the embedded model."""

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest
from harness.clients.programs import go_client, node_client
from harness.servers.processes import running

from kvferry.core.errors import Unavailable

MODEL = "smollm2-135m-instruct"
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("up", "--model", MODEL, "--kv-memory", "256MiB", "--json", *ADDRESSES) as stack:
        yield f"http://{stack.wait_for('ready')['http']}/v1"
        assert stack.stop() == 0


@pytest.mark.parametrize("command", [go_client, node_client])
def test_chats_streams_calls_formats_vectors_and_errors(url: str, command: Callable[[], list[str]]) -> None:
    try:
        client = command()
    except Unavailable as error:
        pytest.skip(error.message)
    done = subprocess.run([*client, url, MODEL], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"] == 1
    assert len(found["chat"]) > 5
    assert found["usage"] <= 24
    assert found["stream"] == found["chat"]
    assert list(json.loads(found["object"])) == ["city"]
    assert found["call"] == "get_weather"
    assert list(json.loads(found["arguments"])) == ["city"]
    assert found["answered"]
    assert found["completion"].startswith(" Paris")
    assert found["dimensions"] == 576
    assert found["response"] == found["response_stream"] == found["chat"]
    assert (found["refused"], found["refused_param"]) == (404, "model")
