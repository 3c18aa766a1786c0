"""Engines with the Triton backend give the tokens of the torch backend; Triton is imported only on request."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import FEATURED

from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.build import build_model, resolve_kernels
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels.ops import device_ops_for, ops_for
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig

PROMPTS = [[5], list(range(100, 117)), [257, *b"user\nhello", 258], list(b"a longer prompt " * 3)]
VARIANTS = {
    "llama": tiny.config(),
    "qwen3": tiny.config(qk_norm=True),
    "qwen2": tiny.config(qkv_bias=True),
    **FEATURED,
}
QUICK = ("window, caps, norms around", "multipliers, part rotated, part not")
"""Variants for which every kind of change is tested. They have all features of the others."""


def tokens(config: ModelConfig, kernels: str, device: torch.device | str, chunks: Sequence[int]) -> list[list[int]]:
    model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels=kernels, device=device)
    shape = KvLayout.of(config, block_tokens=4, dtype="float32")
    runner = Runner(model, PagedKv.allocate(shape, 64, device))
    turn = iter([*chunks, *[10_000] * 1000])
    made = generate(runner, PROMPTS, 8, chunk=lambda _: next(turn))
    return [g.tokens[len(g.prompt) :] for g in made]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in VARIANTS]
)
def test_tokens_are_the_torch_family_s(device: torch.device, name: str) -> None:
    config = VARIANTS[name]
    assert tokens(config, "triton", device, [1, 5, 3, 7, 2]) == tokens(config, "torch", "cpu", ())


def test_the_family_is_chosen_on_gpus_only() -> None:
    config = tiny.config()
    assert resolve_kernels("auto", config, "bfloat16", "cuda") == "triton"
    assert resolve_kernels("auto", config, "float16", "cpu") == "torch"
    with pytest.raises(UsageError, match="run on CUDA and ROCm devices, not on meta"):
        ops_for("meta", "triton")
    with pytest.raises(UsageError, match="'torch' have no `DeviceOps`"):
        device_ops_for("cpu", "torch")


@pytest.mark.parametrize(
    "code", ["ops_for('cpu', 'triton')", "resolve_kernels('auto', tiny.config(), 'bfloat16', 'cuda')"]
)
def test_without_interpreter_or_gpu_the_family_is_refused_and_triton_is_not_imported(code: str) -> None:
    program = f"""
import sys
from kvferry.engine.execute.models.build import resolve_kernels
from kvferry.engine.execute.run.runner import Runner
from kvferry.kernels.ops import ops_for
from kvferry.model import tiny
assert "triton" not in sys.modules, "imported without a request"
print({code})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={"TRITON_INTERPRET": "0"}
    )
    if "auto" in code:
        assert done.stdout.strip() == "triton", done.stderr
    else:
        assert "the kernels 'triton' need a GPU; the device is the CPU. Use --kernels auto" in done.stderr
