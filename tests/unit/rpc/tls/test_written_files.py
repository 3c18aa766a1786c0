"""The files that `kvferry key` and `kvferry up` write: valid, private and complete."""

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.servers.pool_certificates import NOW

from kvferry.cli.commands.key import command
from kvferry.core.errors import UsageError
from kvferry.rpc.tls.authority import facts_of
from kvferry.rpc.tls.certificate_files import read_credentials
from kvferry.rpc.tls.written_files import files_in, write_pool


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_commands_make_files_that_processes_accept(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    run("ca", folder)
    for kind in ("worker", "gateway"):
        shown = run("certificate", kind, folder, "--days", "30")
        assert "PRIVATE" not in shown
        files = files_in(folder, kind)
        assert read_credentials(files, is_worker=kind == "worker")
        assert mode(files.key) == 0o600
    assert mode(folder / "ca.key") == 0o600
    assert mode(folder) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.crt", "ca.key", "gateway.crt", "gateway.key", "worker.crt", "worker.key"
    ]  # fmt: skip


def test_a_renewal_replaces_a_certificate_and_a_ca_is_never_replaced(tmp_path: Path) -> None:
    run("ca", tmp_path / "ca")
    first = tmp_path / "ca" / "ca.crt"
    kept = first.read_text()
    for _ in range(2):
        run("certificate", "worker", tmp_path / "ca", "--into", tmp_path / "worker")
    files = files_in(tmp_path / "worker", "worker")
    assert {path.name for path in (tmp_path / "worker").iterdir()} == {"worker.crt", "worker.key"}
    assert facts_of(files.chain.read_text())[0].issuer == facts_of(kept)[0].issuer
    result = CliRunner().invoke(command, ["ca", str(tmp_path / "ca")])
    assert result.exit_code == 2
    assert "already has a CA" in result.output
    assert first.read_text() == kept


def test_a_certificate_needs_a_ca(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["certificate", "worker", str(tmp_path)])
    assert result.exit_code == 2
    assert f"kvferry key ca {tmp_path}" in result.output


def test_the_files_of_a_run_have_no_ca_key(tmp_path: Path) -> None:
    found = write_pool(tmp_path, NOW, 10)
    for kind, files in found.items():
        assert read_credentials(files, is_worker=kind == "worker")
        assert mode(files.key) == 0o600
    assert not (tmp_path / "ca.key").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_pool(tmp_path / "file", NOW, 10)
