"""A list of adapters: its parsing, and the adapters that are loaded, removed and tried again."""

import json
from pathlib import Path

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ModelFileError, UnknownModel, UsageError
from kvferry.core.ids import AdapterId
from kvferry.workers.adapters.adapter_list import MAX_LIST_BYTES, ListedAdapter, changes, read_adapter_list
from kvferry.workers.adapters.listed_adapters import RETRY_SECONDS, ListedAdapters


def entry(name: str, path: str = "/a", digest: str = "") -> str:
    return f"[[adapters]]\nname = {json.dumps(name)}\npath = {json.dumps(path)}\ndigest = {json.dumps(digest)}\n"


class FakeLoader:
    """A loader that can load the paths in `good`."""

    def __init__(self, *good: str) -> None:
        self.good = set(good)
        self.calls: list[str] = []
        self.loaded: dict[str, str] = {}
        self.versions: dict[str, AdapterId] = {}

    def served(self) -> dict[str, AdapterId]:
        return {name: self.versions[name] for name in self.loaded}

    def replace(self, name: str) -> None:
        """Load another version, as a call of an administrator does."""
        self.loaded[name], self.versions[name] = "/other", AdapterId(name, bytes([1] * 32))

    async def load_listed(self, name: str, path: Path, digest: str) -> AdapterId:
        self.calls.append(f"load {name} {path}")
        if str(path) not in self.good:
            raise ModelFileError(f"{path} is missing")
        self.loaded[name], self.versions[name] = f"{path}{digest}", AdapterId(name, bytes(32))
        return self.versions[name]

    async def unload(self, name: str) -> AdapterId:
        self.calls.append(f"unload {name}")
        if name not in self.loaded:
            raise UnknownModel("gone")
        del self.loaded[name]
        return AdapterId(name, bytes(32))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[adapters]]\nname = 1", "Expected `str`"),
        (entry("a", "relative"), "path"),
        (entry("a", digest="xyz"), "digest"),
        (entry("a") + entry("a", "/b"), "'a' twice"),
        ("[[adapters]]\nname = 'a'\npath = '/a'\nrank = 8", "unknown field `rank`"),
        ("[[adapters", "not valid"),
        (f"adapters = {'9' * 5000}", "too many digits"),
        ("#" * (MAX_LIST_BYTES + 1), "more than"),
    ],
)
def test_a_list_that_is_not_valid_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_adapter_list(text.encode())


def test_an_empty_list_has_no_adapters() -> None:
    assert read_adapter_list(b"") == {}


def test_changes_are_new_changed_and_missing_adapters() -> None:
    one, two, changed = ListedAdapter("a", "/a"), ListedAdapter("b", "/b"), ListedAdapter("a", "/a", "ab" * 8)
    assert changes({"a": one}, {"a": one}) == ([], [])
    assert changes({"a": one}, {"a": changed, "b": two}) == ([changed, two], [])
    assert changes({"a": one, "b": two}, {"b": two}) == ([], ["a"])


async def test_the_adapters_follow_the_list(tmp_path: Path) -> None:
    file, loader, clock = tmp_path / "list.toml", FakeLoader("/a", "/b"), ManualClock()
    listed = ListedAdapters(file, loader, clock)  # type: ignore[arg-type]
    await listed.refresh()
    assert loader.calls == []  # the file does not exist yet
    file.write_text(entry("x") + entry("y", "/b"))
    await listed.refresh()
    await listed.refresh()
    assert loader.calls == ["load x /a", "load y /b"]
    file.write_text(entry("x", "/b"))
    await listed.refresh()
    assert loader.calls[2:] == ["unload y", "load x /b"]
    file.write_text("[[adapters")
    await listed.refresh()
    assert loader.loaded == {"x": "/b"}
    assert "not valid" in listed.failures["list.toml"]
    file.unlink()
    await listed.refresh()
    assert loader.loaded == {"x": "/b"}
    file.write_text("")
    await listed.refresh()
    assert loader.loaded == {}
    assert listed.failures == {}


async def test_an_adapter_that_fails_is_reported_and_tried_again(tmp_path: Path) -> None:
    file, loader, clock = tmp_path / "list.toml", FakeLoader("/b"), ManualClock()
    file.write_text(entry("x") + entry("y", "/b"))
    listed = ListedAdapters(file, loader, clock)  # type: ignore[arg-type]
    await listed.refresh()
    await listed.refresh()
    assert loader.calls == ["load x /a", "load y /b"]  # the other adapters are loaded, and the failed one waits
    assert listed.failures == {"x": "/a is missing"}
    loader.good.add("/a")
    clock.advance(RETRY_SECONDS)
    await listed.refresh()
    assert set(loader.loaded) == {"x", "y"}
    assert listed.failures == {}


async def test_a_listed_adapter_that_a_call_changes_is_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, loader = tmp_path / "list.toml", FakeLoader("/a")
    file.write_text(entry("x"))
    listed = ListedAdapters(file, loader, ManualClock())  # type: ignore[arg-type]
    await listed.refresh()
    for change, word in ((loader.unload, "removed"), (loader.replace, "replaced")):
        caplog.clear()
        changed = change("x")
        if changed is not None:
            await changed
        for _ in range(2):
            await listed.refresh()
        assert loader.loaded == {"x": "/a"}
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            f"adapter x was {word} by a call, but is in {file}: it is loaded again"
        ]
    assert loader.calls == ["load x /a", "unload x", "load x /a", "load x /a"]


async def test_an_adapter_that_an_administrator_has_removed_may_leave_the_list(tmp_path: Path) -> None:
    file, loader = tmp_path / "list.toml", FakeLoader("/a")
    file.write_text(entry("x"))
    listed = ListedAdapters(file, loader, ManualClock())  # type: ignore[arg-type]
    await listed.refresh()
    await loader.unload("x")
    file.write_text("")
    await listed.refresh()
    assert loader.loaded == {}


async def test_an_unreadable_list_changes_no_adapter(tmp_path: Path) -> None:
    file, loader = tmp_path / "list.toml", FakeLoader("/a")
    file.write_text(entry("x"))
    listed = ListedAdapters(file, loader, ManualClock())  # type: ignore[arg-type]
    await listed.refresh()
    file.unlink()
    file.mkdir()
    await listed.refresh()
    assert loader.loaded == {"x": "/a"}
    assert "cannot read" in listed.failures["list.toml"]
    file.rmdir()
    file.write_text("")
    await listed.refresh()
    assert (loader.loaded, listed.failures) == ({}, {})
