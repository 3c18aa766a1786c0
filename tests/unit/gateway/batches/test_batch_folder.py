"""The folder of files and batches: its lock, its rights, and what it deletes. What each storage does is tested in
tests/integration/test_batch_storage.py."""

import os
import stat

import pytest
from harness.servers.batch_pool import NOW, begun, stored

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.batch_errors import NoSuchFile
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.records import result_ids


@pytest.fixture
def folder(tmp_path):
    opened = BatchFolder(tmp_path / "batches")
    yield opened
    opened.close()


def test_one_process_at_a_time_runs_the_batches_of_a_folder(folder):
    file = stored(folder)
    other = BatchFolder(folder.path)
    assert other.exists
    assert folder.try_lock()
    assert folder.try_lock()
    assert not other.try_lock()
    assert other.records.file("a", file.id, NOW) == file
    folder.close()
    assert other.try_lock()
    other.close()


def test_a_folder_that_cannot_be_used_names_its_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="batch_folder"):
        _ = BatchFolder(tmp_path / "file" / "inner").records
    broken = BatchFolder(tmp_path / "broken")
    broken.path.mkdir()
    (broken.path / "records.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(Unavailable, match="batch_folder") as refused:
        _ = broken.records
    assert str(tmp_path) not in refused.value.message, "clients see the message"


def test_files_are_readable_by_their_owner_only(folder):
    file = stored(folder)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for path in (folder.content(file.id), folder.path / "records.sqlite"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_expired_files_are_not_found_and_are_swept_unless_a_batch_reads_them(folder):
    read, dropped = stored(folder, expires=NOW - 1), stored(folder, expires=NOW - 1)
    batch = begun(folder, read)
    with pytest.raises(NoSuchFile):
        folder.records.file("a", dropped.id, NOW)
    folder.content("file-abandoned").write_bytes(b"")
    folder.content(result_ids(batch.id)[0]).write_bytes(b"")
    for path in (folder.path / "files").iterdir():
        os.utime(path, (NOW - 100_000, NOW - 100_000))
    folder.sweep(NOW)
    kept = {path.name for path in (folder.path / "files").iterdir()}
    assert kept == {read.id, result_ids(batch.id)[0]}
