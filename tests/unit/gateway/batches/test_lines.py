"""Lines of input files: what is refused and why, and lines of results that were cut off."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.batches import lines
from kvferry.gateway.batches.lines import (
    ENDPOINTS,
    MAX_BLANK_LINES,
    MAX_ERRORS,
    MAX_LINES,
    Validation,
    done_id,
    numbered_lines,
    valid_lines,
    validate,
)
from kvferry.gateway.batches.result_file import ResultFile

CHAT = ENDPOINTS[0]
MOST = 4096


def validated(path: Path) -> Validation:
    with path.open("rb") as file:
        return validate(file, CHAT, MOST)


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in fields.items() if value != "absent"}).encode()


def errors(tmp_path: Path, content: bytes) -> list[tuple[str, int | None]]:
    path = tmp_path / "input"
    path.write_bytes(content)
    return [(error.code, error.line) for error in validated(path).errors]


def test_a_valid_file_has_a_model_and_a_number_of_lines(tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"\xef\xbb\xbf" + line("a") + b"\r\n\n  \n" + line("b"))
    found = validated(path)
    assert (found.errors, found.model, found.total) == ([], "m", 2)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b"[" * 100_000, "line_too_long"),
        (b'{"custom_id": "b", "body": ' + b"[" * 4000, "invalid_json_line"),
        (line("absent"), "missing_required_parameter"),
        (line(""), "missing_required_parameter"),
        (line(7), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", method=None), "invalid_method"),
        (line("b", url="/v1/embeddings"), "mismatched_endpoint"),
        (line("b", url=[1]), "mismatched_endpoint"),
        (line("b", body="absent"), "missing_required_parameter"),
        (line("b", body=[]), "missing_required_parameter"),
        (line("b", body={"model": 7}), "invalid_model"),
        (line("b", body={"model": "n"}), "mismatched_model"),
        (line("b", body={}), "mismatched_model"),
        (line("first"), "duplicate_custom_id"),
        (line("b", body={"model": "m", "a": "x" * 20_000}), "line_too_long"),
    ],
)
def test_a_line_in_the_middle_is_refused_with_its_number(tmp_path, wrong, code):
    content = b"\n".join([line("first"), wrong, line("last")])
    assert errors(tmp_path, content) == [(code, 2)]


def test_the_blank_lines_of_a_file_are_bounded(tmp_path):
    content = line("a") + b"\n" * (MAX_BLANK_LINES + 1) + line("b")
    assert errors(tmp_path, content) == []
    content += b"\n\n" + line("c")
    assert errors(tmp_path, content) == [("too_many_requests", MAX_BLANK_LINES + 3)]
    found = list(valid_lines(io.BytesIO(content), CHAT, MOST))
    assert [one.custom_id for one in found] == ["a", "b"]


def test_a_file_that_was_not_checked_has_no_more_lines_than_one_that_was():
    content = b"\n".join(line(str(number)) for number in range(MAX_LINES + 2))
    assert len(list(valid_lines(io.BytesIO(content), CHAT, MOST))) == MAX_LINES


def test_an_empty_file_has_an_error_without_a_line(tmp_path):
    assert errors(tmp_path, b"\n \n") == [("empty_file", None)]


def test_the_number_of_errors_and_of_lines_is_bounded(tmp_path, monkeypatch):
    assert len(errors(tmp_path, b"{\n" * 1000)) == MAX_ERRORS
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    assert errors(tmp_path, b"\n".join(line(str(number)) for number in range(5))) == [("too_many_requests", 4)]


def test_the_mark_at_the_beginning_of_a_file_does_not_count_as_part_of_a_line():
    found = list(numbered_lines(io.BytesIO(b"\xef\xbb\xbf" + b"x" * 9 + b"\n" + b"y\n"), 10))
    assert found == [(1, b"x" * 9 + b"\n"), (2, b"y\n")]


@given(st.lists(st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"")), max_size=8), st.integers(1, 20))
def test_lines_keep_their_numbers_whatever_their_length(texts, most):
    found = dict(numbered_lines(io.BytesIO(b"".join(text + b"\n" for text in texts)), most))
    for number, text in enumerate(texts, 1):
        whole = text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
        if number in found and found[number] is not None:
            assert found[number] == whole + b"\n"
        elif number in found:
            assert len(whole) + 1 > most
    assert set(found) <= set(range(1, len(texts) + 1))


RESULT = lines.result_line("a", None, lines.EXPIRED)


@given(st.integers(0, 3 * len(RESULT)), st.binary(max_size=8))
def test_a_file_of_results_is_cut_back_to_its_whole_lines(tmp_path_factory, place, noise):
    path = tmp_path_factory.mktemp("results") / "file"
    whole = b"".join(lines.result_line(name, None, lines.EXPIRED) for name in "abc")
    path.write_bytes(whole[:place] + noise.replace(b"\n", b""))
    file = ResultFile(path)
    try:
        count = whole[:place].count(b"\n")
        assert (file.count, file.done) == (count, set("abc"[:count]))
        file.append(lines.result_line("d", None, lines.CANCELLED))
        assert [done_id(each) for each in path.read_bytes().splitlines(keepends=True)] == [*"abc"[:count], "d"]
    finally:
        file.close()


def test_a_failed_append_leaves_the_file_as_before(tmp_path, monkeypatch):
    file = ResultFile(tmp_path / "file")
    file.append(RESULT)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("kvferry.gateway.batches.result_file.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            file.append(RESULT)
    assert (tmp_path / "file").read_bytes() == RESULT
    file.append(RESULT)
    file.close()
    assert (tmp_path / "file").read_bytes() == RESULT * 2
