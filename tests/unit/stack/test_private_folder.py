"""A folder for private keys is removed at the end of its process, even after a kill."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.stack.private_folder import PrivateFolder

HOLDER = """
import sys
from kvferry.stack.private_folder import PrivateFolder
print(PrivateFolder("keys-").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_private_folder_is_readable_by_its_user_only_and_is_removed(tmp_path: Path) -> None:
    folder = PrivateFolder("keys-")
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "key.pem").write_text("secret")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    unlocked = tmp_path / "keys-new"  # a process has created this folder, and not yet its lock
    unlocked.mkdir()
    (tmp_path / "keys-link").symlink_to(tmp_path)
    (tmp_path / "keys-file").write_text("")
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().decode().strip())
        PrivateFolder("keys-").remove()
        assert theirs.is_dir()
        holder.kill()
        holder.wait(60)
        assert theirs.is_dir()
        ours = PrivateFolder("keys-")
    assert not theirs.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"keys-new", "keys-link", "keys-file", ours.path.name}
    assert os.listdir(ours.path) == ["lock"]
    ours.remove()
