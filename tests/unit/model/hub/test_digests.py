"""Files are verified against digests, and read again only if they have changed."""

import hashlib
from pathlib import Path

import pytest

from kvferry.model.hub.digests import VerifiedFiles, content_digest, discard, name_digest

CONTENT = b"content" * 1000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def test_digests_are_those_of_large_files_and_of_git(file: Path, tmp_path: Path) -> None:
    assert content_digest(file, is_sha256=True) == hashlib.sha256(CONTENT).hexdigest()
    file.write_bytes(b"hello\n")
    assert content_digest(file, is_sha256=False) == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object


def test_a_verified_file_is_not_read_again_until_it_changes(file: Path, tmp_path: Path) -> None:
    read: list[int] = []
    verified, digest = VerifiedFiles(tmp_path / "marks"), hashlib.sha256(CONTENT).hexdigest()
    for _ in range(3):
        assert verified.holds(file, digest, read.append)
    assert sum(read) == len(CONTENT)
    assert [path.name for path in (tmp_path / "marks").iterdir()] == [digest]
    file.write_bytes(CONTENT[:-1] + b"x")
    assert not verified.holds(file, digest, read.append)
    assert sum(read) == 2 * len(CONTENT)


def test_without_a_place_for_marks_each_file_is_read(file: Path, tmp_path: Path) -> None:
    read: list[int] = []
    verified = VerifiedFiles(file / "below a file")
    for _ in range(2):
        assert verified.holds(file, hashlib.sha256(CONTENT).hexdigest(), read.append)
    assert sum(read) == 2 * len(CONTENT)


@pytest.mark.parametrize(
    ("target", "digest"),
    [("blobs/" + "a" * 64, "a" * 64), ("../" + "0" * 40, "0" * 40), ("blobs/etag", ""), ("b/" + "A" * 64, "")],
)
def test_the_name_of_the_content_is_its_digest(tmp_path: Path, target: str, digest: str) -> None:
    (tmp_path / "link").symlink_to(target)
    assert name_digest(tmp_path / "link") == digest


def test_a_file_that_is_no_link_has_no_digest_in_its_name(file: Path) -> None:
    assert name_digest(file) == ""
    assert name_digest(file.with_name("absent")) == ""


def test_a_discarded_file_and_its_content_are_gone(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    discard(link)
    assert not link.is_symlink()
    assert not file.exists()
    discard(link)
