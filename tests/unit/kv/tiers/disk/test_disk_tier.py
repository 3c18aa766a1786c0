"""The disk tier's folder: eviction order, contents after a restart, and alignment of direct I/O."""

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.disk import disk_probe, disk_tier, object_file
from kvferry.kv.tiers.disk.object_file import ALIGNMENT, TEMPORARY, aligned_buffer, file_bytes
from kvferry.kv.tiers.interface.spec import parse_tier
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence, TierError
from kvferry.kv.tiers.policy.disk_index import DiskEntry, DiskIndex

SECRET = b"a secret of 16 bytes"
SIZE = 10_000
SECONDS = 10.0


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def key(number: int) -> ObjectKey:
    return ObjectKey(name(number), "t")


def content(number: int) -> bytes:
    return bytes((number + i) % 256 for i in range(SIZE))


def open_disk(folder: Path, clock: ManualClock, num_files: int = 4, options: str = "&direct=off") -> disk_tier.DiskTier:
    spec = parse_tier(f"disk://{folder}?size={num_files * file_bytes(SIZE)}{options}")
    return disk_tier.open_tier(spec, object_bytes=SIZE, secret=SECRET, clock=clock)


def put(tier: disk_tier.DiskTier, number: int) -> bool:
    return tier.store(key(number), [memoryview(content(number))], SECONDS)


def get(tier: disk_tier.DiskTier, number: int) -> bytes:
    into = bytearray(SIZE)
    tier.load(key(number), [memoryview(into)], SECONDS)
    return bytes(into)


def there(tier: disk_tier.DiskTier, numbers: range) -> list[int]:
    answers = tier.lookup([key(n) for n in numbers], SECONDS)
    return [n for n, answer in zip(numbers, answers, strict=True) if answer is Presence.YES]


# ---------------------------------------------------------------------- index


def test_the_least_recently_used_objects_are_evicted_until_there_is_room() -> None:
    index = DiskIndex(100)
    for number in range(4):
        index.add(name(number), DiskEntry(25, float(number)))
    assert index.make_room(0) == []
    index.use(name(0), 10.0, 60.0)
    assert index.make_room(30) == [name(1), name(2)]
    assert name(0) in index
    assert (len(index), index.num_bytes) == (2, 50)
    assert index.make_room(1000) == [name(3), name(0)], "an object larger than the tier evicts all, once"
    assert index.make_room(1000) == []


def test_the_time_of_use_is_written_at_intervals() -> None:
    index = DiskIndex(100)
    index.add(name(1), DiskEntry(10, 0.0))
    assert not index.use(name(1), 59.0, 60.0)
    assert index.use(name(1), 61.0, 60.0)
    assert not index.use(name(1), 62.0, 60.0)
    assert index.use(name(1), -1000.0, 60.0), "a use is written after the clock was set back"
    assert index.use(name(2), 0.0, 60.0), "a use of an object that is not in the index is written"
    assert name(2) not in index


def test_a_scan_keeps_more_recent_times_of_use() -> None:
    index = DiskIndex(100)
    index.add(name(1), DiskEntry(10, 1.0))
    index.add(name(2), DiskEntry(10, 2.0))
    index.use(name(1), 30.0, 60.0)
    index.rebuild([(name(2), DiskEntry(10, 2.0)), (name(1), DiskEntry(10, 1.0)), (name(3), DiskEntry(10, 20.0))])
    assert index.make_room(100) == [name(2), name(3), name(1)]
    index.rebuild([])
    assert (len(index), index.num_bytes) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "drop", "room"]), st.integers(0, 9), st.integers(1, 40))))
def test_the_byte_count_is_that_of_the_files(steps: list[tuple[str, int, int]]) -> None:
    index, files = DiskIndex(100), dict[BlockHash, int]()
    for step, (what, number, size) in enumerate(steps):
        if what == "add":
            index.add(name(number), DiskEntry(size, float(step)))
            files[name(number)] = size
        elif what == "use":
            index.use(name(number), float(step), 1.0)
        elif what == "drop":
            index.drop(name(number))
            files.pop(name(number), None)
        else:
            for gone in index.make_room(size):
                del files[gone]
            assert index.num_bytes + size <= 100 or not files
        assert index.num_bytes == sum(files.values())
        assert len(index) == len(files)


# ---------------------------------------------------------------------- folder


def test_recency_is_preserved_over_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    tier = open_disk(tmp_path / "t", clock)
    for number in range(4):
        put(tier, number)
        os.utime(next(tmp_path.rglob(name(number).hex())), (clock.wall(), clock.wall()))
        clock.advance(10.0)
    clock.advance(1000.0)
    get(tier, 0)
    again = open_disk(tmp_path / "t", clock)
    assert there(again, range(4)) == [0, 1, 2, 3]
    put(again, 4)
    assert there(again, range(5)) == [0, 2, 3, 4]


def test_a_smaller_size_is_kept_at_once(tmp_path: Path) -> None:
    clock = ManualClock()
    tier = open_disk(tmp_path / "t", clock)
    for number in range(4):
        put(tier, number)
    again = open_disk(tmp_path / "t", clock, num_files=2)
    assert again.num_bytes == 2 * file_bytes(SIZE)
    assert len([p for p in (tmp_path / "t").rglob("*") if p.is_file()]) == 2
    spec = parse_tier(f"disk://{tmp_path}/u?size={SIZE}&direct=off")
    tiny = disk_tier.open_tier(spec, object_bytes=SIZE, secret=SECRET, clock=clock)
    assert not put(tiny, 1), "an object larger than the tier is declined"


def test_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        put(open_disk(tmp_path / "t", ManualClock()), 1)
    finally:
        os.umask(old)
    for path in (tmp_path / "t", *(tmp_path / "t").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o600 if path.is_file() else 0o700)


def test_an_object_being_stored_is_reported_as_not_yet_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(tmp_path / "t", ManualClock())
    seen: list[Presence] = []
    original = disk_tier.write_object

    def watched(*arguments: object, **named: object) -> None:
        seen.extend(tier.lookup([key(1), key(2)], SECONDS))
        assert not put(tier, 1), "the object is being stored already"
        original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_tier, "write_object", watched)
    put(tier, 1)
    assert seen == [Presence.NOT_YET, Presence.NO]
    assert there(tier, range(3)) == [1]


def test_the_deadline_holds_between_chunks(tmp_path: Path) -> None:
    class Slow(ManualClock):
        def monotonic(self) -> float:
            self.advance(1.0)
            return self.now

    tier = open_disk(tmp_path / "t", Slow(), options="&direct=off")
    with pytest.raises(TierError, match="deadline passed"):
        tier.store(key(1), [memoryview(content(1))], 0.5)
    assert not [p for p in (tmp_path / "t").rglob("*") if p.is_file()]
    assert put(tier, 1)
    with pytest.raises(TierError, match="deadline passed"):
        tier.load(key(1), [memoryview(bytearray(SIZE))], 0.5)
    assert get(tier, 1) == content(1), "a load after its deadline does not remove the object"


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "t", ManualClock())
    put(tier, 1)
    folder = next((tmp_path / "t").rglob(name(1).hex())).parent
    foreign = [folder / "readme", folder / ("ab" * 32), tmp_path / "t" / "notes", tmp_path / "t" / "x" / "y"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    probe = tmp_path / "t" / f"{TEMPORARY}probe-of-a-dead-worker"
    probe.write_text("litter")
    again = open_disk(tmp_path / "t", ManualClock(), num_files=1)
    assert all(path.read_text() == "mine" for path in foreign)
    assert not probe.exists()
    assert again.num_bytes == file_bytes(SIZE)


@pytest.mark.parametrize("aligned", [True, False])
def test_direct_reads_return_the_stored_bytes(tmp_path: Path, aligned: bool) -> None:
    size = 8 * ALIGNMENT if aligned else SIZE
    spec = parse_tier(f"disk://{tmp_path}/t?size=1MiB&direct=on")
    tier = disk_tier.open_tier(spec, object_bytes=size, secret=SECRET, clock=ManualClock())
    data = os.urandom(size)
    tier.store(key(1), [memoryview(data)], SECONDS)
    buffer = aligned_buffer(size)[:size]
    parts = [buffer[:ALIGNMENT], buffer[ALIGNMENT : 3 * ALIGNMENT], buffer[3 * ALIGNMENT :]] if aligned else [buffer]
    tier.load(key(1), parts, SECONDS)
    assert bytes(buffer) == data
    assert len(tier._bounces) == 1


def test_a_file_system_without_direct_io_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk_probe, "_open_direct", refuse)
    with pytest.raises(UsageError, match="direct=auto"):
        open_disk(tmp_path / "t", ManualClock(), options="&direct=on")
    tier = open_disk(tmp_path / "t", ManualClock(), options="")
    assert put(tier, 1)
    assert get(tier, 1) == content(1)
    assert not list((tmp_path / "t").glob(f"{TEMPORARY}*"))


@pytest.mark.parametrize(("past", "through", "expected"), [(1.0, 2.0, True), (1.0, 1.1, False), (2.0, 1.0, False)])
def test_direct_io_is_used_where_it_is_clearly_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past: float, through: float, expected: bool
) -> None:
    measured = iter([past] * 3 + [through] * 3)
    monkeypatch.setattr(disk_probe, "_seconds", lambda *_: next(measured))
    assert disk_probe.direct_is_better(tmp_path, ManualClock(), must=False, object_bytes=SIZE) is expected


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        open_disk(tmp_path / "file" / "t", ManualClock())


# ---------------------------------------------------------------------- scans beside stores


@pytest.mark.parametrize("when", ["before the lock", "during the lock"])
def test_a_store_survives_the_sweep_of_its_unlocked_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tier = open_disk(tmp_path / "t", ManualClock())
    real, swept = fcntl.flock, list[bool]()

    def flock(fd: int, operation: int) -> None:
        if swept:
            return real(fd, operation)
        swept.append(True)
        (temporary,) = (path for path in tmp_path.rglob("*") if path.name.startswith(TEMPORARY))
        if when == "before the lock":
            assert object_file.sweep(temporary)
        else:
            temporary.unlink()
            raise BlockingIOError
        return real(fd, operation)

    monkeypatch.setattr(object_file.fcntl, "flock", flock)
    assert put(tier, 1)
    assert get(tier, 1) == content(1)
    assert swept == [True]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [name(1).hex()]


def test_a_file_that_is_always_swept_fails_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(tmp_path / "t", ManualClock())

    def flock(fd: int, operation: int) -> None:
        for path in tmp_path.rglob("*"):
            if path.name.startswith(TEMPORARY):
                path.unlink()

    monkeypatch.setattr(object_file.fcntl, "flock", flock)
    with pytest.raises(TierError, match="removed by another worker's scan"):
        put(tier, 1)


def test_a_store_during_a_scan_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(tmp_path / "t", ManualClock(), num_files=100)
    put(tier, 1)
    listed = disk_tier._files

    def files(folder: Path) -> list[os.DirEntry[str]]:
        found = list(listed(folder))
        put(tier, 2)
        put(tier, 3)
        tier._discard(name(3), "for the test")
        return found

    monkeypatch.setattr(disk_tier, "_files", files)
    tier.scan()
    assert tier.num_bytes == 2 * file_bytes(SIZE)
    assert there(tier, range(4)) == [1, 2]


def test_damaged_files_and_folders_take_one_log_line_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    tier = open_disk(tmp_path, clock, num_files=40)
    for number in range(12):
        put(tier, number)
        tier._path(name(number)).write_bytes(b"\0" * 100)
    for number in range(10):
        with pytest.raises(TierError):
            get(tier, number)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "removed a damaged file" in caplog.text
    assert not tier._path(name(3)).exists()
    clock.advance(61)
    with pytest.raises(TierError):
        get(tier, 10)
    assert "; 9 more since the last line" in caplog.text
    caplog.clear()
    path = tier._path(name(11))
    path.unlink()
    path.mkdir()
    for _ in range(3):
        with pytest.raises(TierError):
            get(tier, 11)
    assert path.is_dir()
    (record,) = caplog.records
    assert "cannot be removed" in record.getMessage()
    assert str(path) in record.getMessage()
