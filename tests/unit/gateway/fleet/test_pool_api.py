"""Client of an API server, with prepared responses; tests/cluster tests it with a real server."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from kvferry.cli.commands.gateway import command
from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import PoolName
from kvferry.gateway.fleet.pool_api import ApiError, PoolApi, Watch


class Response:
    """A body in parts. A part that is an exception is raised."""

    def __init__(self, *parts: bytes | Exception) -> None:
        self.parts = parts
        self.is_closed = False

    def stream(self, **_: Any) -> Iterator[bytes]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part

    def close(self) -> None:
        self.is_closed = True


def test_events_are_lines_however_they_are_cut():
    response = Response(b'{"type":', b'"ADDED"}\n{"type":"BOOK', b'MARK"}\n\n', b'{"type":"cut off"')
    with Watch(response) as watch:
        assert [event["type"] for event in watch] == ["ADDED", "BOOKMARK"]
        watch.stop()  # has no effect after the end of the watch
    assert response.is_closed


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((b"{}\n", OSError("reset")), "interrupted: OSError: reset"),
        ((b"what?\n",), "not JSON"),
        ((b"[1]\n",), "not a JSON object"),
    ],
)
def test_an_invalid_event_ends_the_watch(parts, why):
    with Watch(Response(*parts)) as watch, pytest.raises(ApiError, match=why):
        list(watch)


def test_an_event_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr("kvferry.gateway.fleet.pool_api._MAX_BYTES", 100)
    with Watch(Response(b"x" * 60, b"x" * 60)) as watch, pytest.raises(ApiError, match="more than 100 bytes"):
        list(watch)


def test_without_credentials_the_error_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="KUBECONFIG"):
        PoolApi.connect(PoolName("ns", "p"))


def test_a_gateway_without_a_pool_does_not_load_the_clusters_client():
    code = "import sys, kvferry.gateway.serve; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--pool", "ns/p", "--both", "h:1", "--decode", "h:2"], "--pool cannot be combined with --decode, --both"),
        (["--pool", "p"], "'p' is not a pool; use NAMESPACE/NAME"),
    ],
)
def test_the_command_refuses_contradicting_options(flags, why, monkeypatch):
    monkeypatch.setattr("kvferry.cli.commands.gateway.leave_on_signals", lambda: None)
    done = CliRunner().invoke(command, flags)
    assert done.exit_code == 2
    assert why in done.output


def test_help_documents_pools():
    shown = CliRunner().invoke(command, ["--help-all"]).output
    for flag in ("--pool", "--max-held", "--hold-seconds", "--linger-seconds"):
        assert flag in shown
