"""Log lines are JSON objects with the request id, and a second set-up replaces the first."""

import json
import logging
from collections.abc import Iterator

import pytest

from kvferry.core.process import logs

NOISY = ("asyncio", "grpc", "httpx", "uvicorn.access", "uvicorn.error")


@pytest.fixture(autouse=True)
def _logging_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, levels = root.handlers[:], root.level, {n: logging.getLogger(n).level for n in NOISY}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_a_line_is_one_object_for_any_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", as_json=True)
    logging.getLogger("kvferry.x").info('a "quoted"\nline é %d', 7, extra={"request_id": "req-1", "secret": "no"})
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "info",
        "logger": "kvferry.x",
        "message": 'a "quoted"\nline é 7',
        "request_id": "req-1",
    }


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", as_json=True)
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError:
        logging.getLogger("kvferry.x").exception("it broke")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: by nothing" in json.loads(line)["exception"]


def test_setting_up_again_replaces_form_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("debug", as_json=True)
    logs.setup("warning", as_json=False)
    logging.getLogger("kvferry.x").info("not shown")
    logging.getLogger("kvferry.x").warning("shown once")
    logging.getLogger("grpc").info("others' chatter")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING kvferry.x: shown once")


def test_control_characters_of_a_message_are_escaped_in_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", as_json=False)
    logging.getLogger("kvferry.x").info("path %s", "/a\n12:00:00 ERROR forged\x1b[2J\x00\x85\u2028é")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"path /a\n12:00:00 ERROR forged\x1b[2J\x00\x85\u2028é")


def test_lines_of_a_supervised_process_have_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", as_json=False, process="prefill-0%s")
    logging.getLogger("kvferry.x").info("loaded")
    logging.getLogger("uvicorn.error").info("Started server process")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prefill-0%s: ")
    assert line.endswith("INFO    kvferry.x: loaded")
    logs.setup("info", as_json=True, process="prefill-0")
    logging.getLogger("kvferry.x").info("loaded")
    assert json.loads(capsys.readouterr().err)["process"] == "prefill-0"
