"""`kvferry bench transfer` and `kvferry doctor` from the command line: their output is consistent at any speed."""

import json
from pathlib import Path

import pytest
from harness.servers.processes import running

SECONDS = 120.0


def output_of(*arguments: str, status: int = 0) -> str:
    with running(*arguments) as process:
        assert process.process.stdout is not None
        text = process.process.stdout.read().decode()
        assert process.process.wait(SECONDS) == status
    return text


def test_transfers_are_measured_against_their_bounds(tmp_path: Path) -> None:
    names = ("memory", "shm", "tcp", "tcp-encrypted", "nixl")
    flags = [flag for name in names for flag in ("--transport", name)]
    report = tmp_path / "rows.json"
    sizes = ("--blocks", "1", "--blocks", "4", "--block-size", "64KiB", "--rounds", "3")
    text = output_of("bench", "transfer", *flags, *sizes, "--json", str(report))
    found = json.loads(report.read_text())
    assert [row["transport"] for row in found["summary"]] == list(names)
    header, *rows = text.splitlines()
    assert header.split()[:3] == ["transport", "blocks", "pages"]
    assert [row.split()[0] for row in rows] == [row["transport"] for row in found["runs"]]
    assert all(f"GB/s of {run['bound']}" in row for row, run in zip(rows, found["runs"], strict=True))
    bounds = {row["transport"]: row["bound"] for row in found["runs"]}
    assert (bounds["shm"], bounds["tcp"], bounds["nixl"]) == ("a copy in memory", "a TCP stream", "bare NIXL")
    assert bounds["tcp-encrypted"] == "plain tcp"
    assert len(found["runs"]) == 3 * len(names), "runs of one block, four blocks, and four scattered blocks"
    for row in found["runs"]:
        assert row["gbps"] > 0
        assert row["bound_gbps"] > 0
        assert row["ms_least"] <= row["ms"] <= row["ms_most"]


def test_the_doctor_reports_the_break_even_length_of_loads(tmp_path: Path) -> None:
    tiers = ("--tier", "dram://?size=8MiB", "--tier", f"disk://{tmp_path}/kv?size=64MiB")
    text = output_of("doctor", "--model", "tiny", "--dtype", "float32", *tiers, "--json")
    found = json.loads(text.splitlines()[-1])
    machine = found["machine"]
    assert machine["cores"]["usable"] <= machine["cores"]["all"]
    assert machine["memory"]["bytes"] > 1 << 20
    assert machine["memory_copy"]["gbps"] > 0
    assert set(machine["prefill"]["tokens_per_second"]) == {"32", "128", "512"}
    by_name = {source["name"]: source for source in found["sources"]}
    assert {"dram", "disk", "shm (this host)", "tcp (this host)"} <= set(by_name)
    for name in ("dram", "disk", "shm (this host)"):
        assert by_name[name]["gbps"] > 0
        assert by_name[name]["note"] == ""
    human = output_of("doctor", "--model", "tiny", "--dtype", "float32", *tiers)
    assert "break-even" in human


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "transfer", "--transport", "pigeon"), "unknown transport 'pigeon'"),
        (("bench", "transfer", "--block-size", "much"), "not a size"),
        (("doctor", "--tier", "pigeon://x"), "unknown tier pigeon"),
        (("doctor", "--tier", "redis://127.0.0.1:1/0"), "redis://127.0.0.1:1/0"),
        (("doctor", "--tier", "redis://u:secret@127.0.0.1:1/0"), "redis://127.0.0.1:1/0"),
        (("up", "--tier", "redis://u:secret@127.0.0.1:1/0?ttl=soon"), "ttl"),
        (("up", "--tier", "disk:///tmp/x"), "size"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    arguments: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(*arguments) as process:
        assert process.process.wait(SECONDS) in {1, 2}
    shown = capfd.readouterr().err
    assert says in shown
    assert "secret" not in shown
    assert "Traceback" not in shown
