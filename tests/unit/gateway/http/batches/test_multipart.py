"""Forms in pieces: every cut gives the same parts, and what is malformed or too large is refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.batches.multipart import MAX_HEADER_BYTES, MAX_PARTS, MultipartReader, Part, boundary_of

BOUNDARY = b"edge"


def form(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    made = b""
    for name, filename, content in parts:
        extra = "" if filename is None else f'; filename="{filename}"'
        made += b'--edge\r\nContent-Disposition: form-data; name="%s"%s\r\nContent-Type: x/y\r\n\r\n' % (
            name.encode(),
            extra.encode(),
        )
        made += content + b"\r\n"
    return made + b"--edge--\r\n"


def read(pieces: list[bytes]) -> tuple[list[tuple[Part, bytes]], bool]:
    reader, found = MultipartReader(BOUNDARY), list[tuple[Part, bytes]]()
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, Part):
                found.append((event, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + event)
    return found, reader.is_complete


CONTENT = st.lists(st.sampled_from([b"\r\n", b"--", b"edge", b"\r\n--", b"\r\n--edg", b"a", b"\0\xff"])).map(b"".join)


@given(st.lists(CONTENT, max_size=4), st.lists(st.integers(0, 400), max_size=12))
def test_parts_do_not_depend_on_the_pieces(contents, cuts):
    contents = [content for content in contents if b"\r\n--edge" not in b"\r\n" + content + b"\r"]
    body = form([(f"n{number}", "f.jsonl", content) for number, content in enumerate(contents)])
    places = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    found, is_complete = read([body[begin:end] for begin, end in itertools.pairwise(places)])
    assert [content for _, content in found] == contents
    assert is_complete


@given(st.integers(0, 200))
def test_a_form_that_is_cut_off_is_not_complete(place):
    body = form([("purpose", None, b"batch"), ("file", "a", b"{}")])
    cut = body[: min(place, len(body) - 4)]
    assert not read([cut])[1]


def test_a_byte_at_a_time():
    body = form([("purpose", None, b"batch"), ("file", 'a "b".jsonl'.replace('"', '\\"'), b"{}\r\n")])
    found, is_complete = read([body[place : place + 1] for place in range(len(body))])
    assert is_complete
    assert found == [(Part("purpose", None), b"batch"), (Part("file", 'a "b".jsonl'), b"{}\r\n")]


@pytest.mark.parametrize(
    "body",
    [
        b"hello",
        b"--other\r\n",
        b"--edge\r\n\r\n\r\n",
        b"--edge\r\nContent-Type: a/b\r\n\r\nx",
        b"--edge\r\nContent-Disposition: attachment; name=a\r\n\r\nx",
        b"--edgeXX",
        b"--edge\r\n" + b"a: b\r\n" * MAX_HEADER_BYTES,
        form([("a", None, b"")] * (MAX_PARTS + 1)),
    ],
)
def test_malformed_and_too_large_forms_are_refused(body):
    with pytest.raises(InvalidRequest):
        read([body])


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=edge", b"edge"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b:c"', b"a b:c"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/form-data; boundary=" + "x" * 71, None),
        ("multipart/mixed; boundary=edge", None),
        ("application/json", None),
        ("", None),
    ],
)
def test_the_boundary_is_that_of_the_content_type(kind, boundary):
    assert boundary_of(kind) == boundary
