"""The coverage floor: each module is checked, and a run without measurements fails."""

import json
from pathlib import Path

import pytest
from harness.house.pure_coverage import covered, main, pure_modules

ROOT = Path(__file__).resolve().parents[3]


def a_report(**percent: float) -> dict[str, dict[str, dict[str, object]]]:
    return {
        "files": {
            f"services/{name.replace('.', '/')}.py": {"summary": {"percent_covered": value}, "missing_lines": [3]}
            for name, value in percent.items()
        }
    }


def test_a_package_includes_its_modules_and_no_others_with_its_prefix() -> None:
    report = a_report(**{"kvferry.core.a": 99.0, "kvferry.core.__init__": 100.0, "kvferry.core_other.b": 1.0})
    assert [(r.module, r.percent) for r in covered(report, ["kvferry.core"])] == [
        ("kvferry.core", 100.0),
        ("kvferry.core.a", 99.0),
    ]


def test_a_module_that_was_not_measured_is_an_error_not_a_pass() -> None:
    with pytest.raises(ValueError, match=r"no entry for kvferry\.kv\.handoff\.offers"):
        covered(a_report(**{"kvferry.core.a": 99.0}), ["kvferry.core", "kvferry.kv.handoff.offers"])


def test_one_module_below_the_floor_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "coverage.json"
    good = dict.fromkeys([f"{m}.x" if m == "kvferry.core" else m for m in pure_modules(ROOT / "imports.toml")], 95.0)
    path.write_text(json.dumps(a_report(**good)))
    assert main([str(path)]) == 0
    path.write_text(json.dumps(a_report(**{**good, "kvferry.kv.handoff.offers": 94.9})))
    assert main([str(path)]) == 1
    assert "kvferry.kv.handoff.offers" in next(
        line for line in capsys.readouterr().out.splitlines() if "below 95 %" in line
    )
