"""Records: tenants see their own, states follow the table, and bounds hold over processes."""

import os
import stat

import pytest

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.gateway.batches import store as stores
from kvferry.gateway.batches.batch_errors import NoSuchBatch, NoSuchFile, WrongState
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.records import BatchRecord, FileRecord, new_batch_id, new_file_id, result_ids
from kvferry.gateway.batches.states import BATCH_MACHINE, BatchEvent, BatchState

NOW = 1_700_000_000


@pytest.fixture
def folder(tmp_path):
    opened = BatchFolder(tmp_path / "batches")
    yield opened
    opened.close()


def stored(folder: BatchFolder, tenant: str = "a", size: int = 3, expires: int = NOW + 100) -> FileRecord:
    with folder.new_upload(new_file_id()) as upload:
        upload.write(b"x" * size)
        record = FileRecord(upload.path.name, tenant, "batch", "f", size, NOW, expires)
        folder.add(upload, record, max_files=3, max_bytes=10)
    return record


def begun(folder: BatchFolder, file: FileRecord) -> BatchRecord:
    record = BatchRecord(
        new_batch_id(), file.tenant, "/v1/embeddings", file.id, BatchState.VALIDATING, NOW, {}, output_seconds=3600
    )
    folder.records.add_batch(record)
    return record


def listed(folder: BatchFolder, tenant: str = "a", **changes: object) -> list[str]:
    given = {"limit": 10, "after": None, "is_ascending": True, "purpose": None, **changes}
    return [record.id for record in folder.records.files(tenant, NOW, **given)]


def test_a_tenant_sees_its_own_files_only(folder):
    mine, other = stored(folder), stored(folder, "b")
    assert listed(folder) == [mine.id]
    with pytest.raises(NoSuchFile) as foreign:
        folder.records.file("a", other.id, NOW)
    with pytest.raises(NoSuchFile) as unknown:
        folder.records.file("a", "file-" + "0" * 24, NOW)
    assert foreign.value.message.replace(other.id, "") == unknown.value.message.replace("file-" + "0" * 24, "")
    with pytest.raises(NoSuchFile):
        folder.delete("a", other.id, NOW)
    with pytest.raises(NoSuchFile, match="after"):
        listed(folder, after=other.id)
    assert folder.content(other.id).read_bytes() == b"xxx"


def test_files_are_listed_in_order_and_in_pages(folder):
    made = [stored(folder).id for _ in range(3)]
    assert listed(folder, limit=2) == made[:2]
    assert listed(folder, after=made[0]) == made[1:]
    assert listed(folder, is_ascending=False, after=made[2], limit=1) == [made[1]]
    assert listed(folder, purpose="batch_output") == []


def test_files_and_bytes_of_a_tenant_are_bounded_and_a_refused_file_leaves_nothing(folder):
    stored(folder, size=9)
    with pytest.raises(Overloaded, match="tenant_file_bytes"):
        stored(folder, size=2)
    stored(folder, size=0)
    stored(folder, size=0)
    with pytest.raises(Overloaded, match="tenant_files"):
        stored(folder, size=0)
    assert len(list((folder.path / "files").iterdir())) == 3
    assert list((folder.path / "uploads").iterdir()) == []
    stored(folder, "b", size=9)


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


def test_the_input_of_a_batch_is_not_deleted(folder):
    file = stored(folder)
    batch = begun(folder, file)
    with pytest.raises(WrongState, match=batch.id):
        folder.delete("a", file.id, NOW)
    folder.records.change(batch.id, BatchEvent.REFUSE, NOW)
    folder.delete("a", file.id, NOW)
    assert not folder.content(file.id).exists()


def test_states_follow_the_table(folder):
    batch = begun(folder, stored(folder))
    change = folder.records.change
    assert change(batch.id, None, NOW, completed=1) is None, "there is no progress before the validation"
    assert change(batch.id, BatchEvent.ACCEPT, NOW + 1, total=2).times == {"in_progress": NOW + 1}
    assert change(batch.id, None, NOW, completed=1).completed == 1
    assert change(batch.id, BatchEvent.CANCEL, NOW + 2).status is BatchState.CANCELLING
    assert change(batch.id, BatchEvent.FINISH, NOW) is None
    assert change(batch.id, BatchEvent.STOP, NOW + 3).is_over
    assert folder.records.open_batches() == []
    assert change("batch_none", BatchEvent.CANCEL, NOW) is None
    for state in BATCH_MACHINE.final:
        assert not any(BATCH_MACHINE.allows(state, event) for event in BatchEvent)


def test_batches_of_a_tenant_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(stores, "MAX_OPEN_BATCHES", 2)
    monkeypatch.setattr(stores, "MAX_BATCHES", 3)
    file = stored(folder)
    made = [begun(folder, file).id for _ in range(2)]
    with pytest.raises(Overloaded, match="2 batches are not over"):
        begun(folder, file)
    for _ in range(3):
        folder.records.change(made[-1], BatchEvent.REFUSE, NOW)
        made.append(begun(folder, file).id)
    found = [record.id for record in folder.records.batches("a", limit=10, after=None)]
    assert found == [made[4], made[3], made[2], made[0]], "the oldest that was over is dropped"
    assert [r.id for r in folder.records.batches("a", limit=1, after=made[3])] == [made[2]]
    with pytest.raises(NoSuchBatch):
        folder.records.batch("b", made[4])
    folder.records.drop_batches(NOW + 1)
    assert {r.id for r in folder.records.batches("a", limit=10, after=None)} == {made[0], made[4]}


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
