"""Golden files of names and wire formats, which change only together with a version."""

from pathlib import Path

import pytest
from harness.house import golden


@pytest.mark.parametrize("path", golden.vectors(), ids=lambda p: p.name)
def test_vectors_equal_the_golden_files(path: Path) -> None:
    assert path.read_text("utf-8") == golden.vectors()[path]


def test_a_stale_file_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(golden, "generated_code", dict)
    assert golden.main(["verify"]) == 0
    monkeypatch.setattr(golden, "vectors", lambda: {golden.GOLDEN / "ticket.json": "other"})
    assert golden.main(["verify"]) == 1
    assert "make golden" in capsys.readouterr().err
    assert golden.main([]) == 2
