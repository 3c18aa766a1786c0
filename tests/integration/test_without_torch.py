"""Workers with compiled kernels never import torch, which would take a second and half a gigabyte per worker."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness.servers.processes import running

from kvferry.kernels import compiled

pytestmark = pytest.mark.skipif(not compiled.levels(), reason="the compiled kernels were not built")

ENGINE = """
import sys
from kvferry.core.sampling import SamplingParams
from kvferry.engine.offline.llm import LLM
llm = LLM("tiny", kv_memory=8 << 20, threads=1)
drawn = llm.generate(["one", "another"], SamplingParams(temperature=0.7, max_tokens=8, logprobs=2))
assert [len(c.token_ids) for c in drawn] == [8, 8]
print(sorted(m for m in sys.modules if m.partition(".")[0] in ("torch", "triton", "transformers")))
"""


def test_an_engine_generates_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_worker_does_not_load_torch(role: str) -> None:
    with running("worker", "--role", role, "--model", "tiny", "--kv-memory", "8MiB", "--threads", "1") as worker:
        worker.wait_for("ready")
        mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "_cpu.cpython" in mapped, "compiled kernels are in use"
        assert "libtorch" not in mapped
        assert worker.stop() == 0
