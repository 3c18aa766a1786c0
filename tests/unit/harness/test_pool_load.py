"""The load of tests/cluster/test_zero_loss.py: the requests that it counts as lost, and its table."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from harness.pools import table
from harness.pools.load import Ended, Load, Outcome, Question

ASKED = [Question("What is a ferry?", 16, "A boat.")]


@contextmanager
def gateway(*answers: bytes) -> Iterator[str]:
    """Serve one answer per connection, then repeat the last one; close each connection after its answer."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def whole(text: str, *, missing: int = 0) -> bytes:
    body = b'{"choices": [{"text": "%s"}]}' % text.encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (len(body) + missing)
    return head + body


def stream(*parts: str) -> bytes:
    lines = [b"data: %s\n\n" % part.encode() for part in parts]
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(lines)


CHUNK = '{"choices": [{"text": "A boat."}]}'


@pytest.mark.parametrize(
    ("answers", "outcome", "retries"),
    [
        ([whole("A boat.")], Outcome.RIGHT, 0),
        ([stream(CHUNK, "[DONE]")], Outcome.RIGHT, 0),
        ([b"", whole("A boat.")], Outcome.RIGHT, 1),
        ([whole("A tunnel.")], Outcome.WRONG, 0),
        ([b""], Outcome.LOST, 2),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"], Outcome.LOST, 0),
        ([whole("A boat.", missing=5)], Outcome.LOST, 0),
        ([stream('{"choices": [], "error": {"message": "no"}}')], Outcome.LOST, 0),
        ([stream('{"choices": [{"text": "A"}]}')], Outcome.LOST, 0),
        ([stream('{"choices": [{"text": "B"}]}')], Outcome.WRONG, 0),
    ],
)
def test_the_outcome_of_a_request(answers: list[bytes], outcome: Outcome, retries: int) -> None:
    end = first_of(answers)
    assert (end.outcome, end.retries) == (outcome, retries), end.note


def first_of(answers: list[bytes]) -> Ended:
    with gateway(*answers) as http, Load(http, "m", ASKED, lanes=1) as load:
        load.until(lambda ended: len(ended) > 0, "the first has ended", 30)
    return load.ended[0]


def test_the_page_has_a_row_for_every_event() -> None:
    """After a change of the events, `make zero-loss`, run as root, updates the page."""
    rows = table.rows_of(table.PAGE.read_text("utf-8"))
    assert [row[0] for row in rows] == list(table.EVENTS)
    assert all(row[3:5] == ["0", "0"] for row in rows), "wrong and lost requests"


def test_a_row_counts_outcomes() -> None:
    ended = [
        Ended(0, 1, Outcome.RIGHT, 1),
        Ended(0, 2.5, Outcome.CUT),
        Ended(1, 2, Outcome.LOST),
        Ended(1, 2, Outcome.WRONG),
    ]
    rows = {event: table.row(event, ended, 12.0) for event in table.EVENTS}
    page = table.renewed(
        "a\n<!-- measured: zero-loss -->\nold\n<!-- end -->\nb", table.Results("two cores", "2026-01-02", rows)
    )
    assert table.rows_of(page)[0] == [table.EVENTS[0], "4", "1", "1", "1", "1", "1", "2.5", "12.0"]
    assert page.startswith("a\n<!-- measured")
    assert page.endswith("<!-- end -->\nb")
    assert "old" not in page
