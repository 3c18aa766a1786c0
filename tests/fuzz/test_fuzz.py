"""Each fuzz target runs for some seconds, and all earlier findings and valid inputs are replayed."""

import subprocess
import sys

import pytest
from harness.fuzz.driver import TARGETS, replay
from harness.fuzz.files import used
from harness.fuzz.target import Target

from kvferry.model.source import open_model

PARSERS = [target for target in TARGETS.values() if not target.is_server]


@pytest.mark.parametrize("target", PARSERS, ids=lambda target: target.name)
def test_valid_inputs_and_earlier_findings_end_as_documented(target: Target) -> None:
    replay(target, target.seeds() + [path.read_bytes() for path in target.findings()])


def test_the_seeds_of_model_files_are_models(tmp_path) -> None:
    """The fuzzer mutates these seeds; mutations of a refused file would reach little code."""
    for number, seed in enumerate(TARGETS["gguf"].seeds()):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(seed)
        used(open_model(str(path)))


@pytest.mark.timeout(600)
def test_no_input_leads_to_an_undocumented_error(request: pytest.FixtureRequest) -> None:
    """All targets run, two at a time for `--fuzz-seconds` each. Servers must still answer a valid request at
    the end. The seed is fixed, so that a change passes or fails by itself; `make fuzz` draws seeds.
    """
    seconds = str(request.config.getoption("--fuzz-seconds"))
    command = [sys.executable, "-m", "harness.fuzz", "--unguided", "--seconds", seconds, "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
