"""Training of a head for the embedded model: equal seeds give equal files, and serving with the head changes no
token.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"


@pytest.mark.long
def test_a_short_training_is_repeatable_and_its_head_serves(tmp_path: Path) -> None:
    for name in "ab":
        command = [sys.executable, str(ROOT / "tests/bench/train_head.py"), "--folder", str(tmp_path / name)]
        command += ["--texts", "10", "--tokens", "12", "--steps", "4", "--vocabulary", "512"]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = LLM(MODEL, kv_memory=1 << 26).generate(["Water is"], params)[0].token_ids
    llm = LLM(MODEL, kv_memory=1 << 26, speculation=f"eagle={tmp_path / 'a'}?k=2&fixed=1")
    assert llm.generate(["Water is"], params)[0].token_ids == expected
    assert llm.engine.speculation is not None
    assert llm.engine.speculation.counts.num_draft_tokens
