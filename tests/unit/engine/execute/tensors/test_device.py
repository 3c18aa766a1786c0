"""Choice of an engine's device: a GPU if there is one and the kernels support it; invalid choices are refused by
name."""

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors import device
from kvferry.engine.execute.tensors.device import choose_device
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.offline.llm import LLM
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.workers import main as worker_main
from kvferry.workers.config import WorkerConfig


@pytest.mark.parametrize(
    ("wanted", "kernels", "sees_gpu", "chosen"),
    [
        ("auto", "auto", True, "cuda"),
        ("auto", "auto", False, "cpu"),
        ("auto", "torch", True, "cuda"),
        ("auto", "compiled", True, "cpu"),
        ("auto", "compiled-avx2", True, "cpu"),
        ("cpu", "auto", True, "cpu"),
        ("cuda", "auto", True, "cuda"),
    ],
)
def test_the_choice(monkeypatch: pytest.MonkeyPatch, wanted: str, kernels: str, sees_gpu: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(device, "_DRIVERS", (Path(__file__),))
    assert choose_device(wanted, kernels=kernels) == chosen


def test_torch_is_not_called_where_no_driver_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "_DRIVERS", ())
    assert choose_device("auto") == "cpu"
    assert choose_device("cuda") == "cuda", "a named device is not checked here, so that torch reports the error"


def test_an_absent_gpu_and_an_unknown_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device 'cuda' needs a GPU, but torch detects none: use --device cpu"):
        choose_device("cuda")
    with pytest.raises(UsageError, match="unknown device 'tpu'; expected one of auto, cpu, cuda, cuda:N") as caught:
        choose_device("tpu")
    assert caught.value.field == "device"


def test_compiled_kernels_on_a_gpu_are_refused_with_the_remedy() -> None:
    config = tiny.config()
    with pytest.raises(UsageError, match=r"they are for CPUs, not for meta \(--device cpu\)"):
        build_model(config, tiny.TinyTensors(config), dtype="bfloat16", kernels="compiled", device="meta")


def test_pages_on_another_device_than_the_model_are_refused() -> None:
    config = tiny.config()
    model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels="torch")
    shape = KvLayout.of(config, block_tokens=4, dtype="float32")
    with pytest.raises(InvariantBroken, match="the pages are on device meta, the model is on cpu"):
        Runner(model, PagedKv.allocate(shape, 2, "meta"))


@pytest.mark.parametrize(
    ("wanted", "visible", "chosen"), [("cuda:1", "", "1"), ("cuda:1", "4,6", "6"), ("cuda:2", "4", "-1")]
)
def test_only_the_chosen_gpu_is_visible_to_the_process(monkeypatch, wanted: str, visible: str, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device(wanted) == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen


def test_a_second_gpu_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device("cuda:0") == "cuda"
    with pytest.raises(UsageError, match=r"already uses cuda:0\. Use one process per GPU"):
        choose_device("cuda:3")


@pytest.mark.parametrize("wanted", ["cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda:1234", "auto:1"])
def test_other_forms_of_a_device_are_refused(wanted: str) -> None:
    with pytest.raises(UsageError, match="expected one of auto, cpu, cuda, cuda:N"):
        choose_device(wanted)


def test_workers_and_stacks_refuse_a_missing_gpu_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = EngineSettings(model="tiny", device="cuda")
    config = WorkerConfig("prefill", engine, connector="tcp", ticket_secrets=(b"0123456789abcdef",))
    with pytest.raises(UsageError, match="device 'cuda' needs a GPU, but torch detects none"):
        worker_main._load(config)


@pytest.mark.parametrize("command", ["up", "demo"])
def test_stacks_refuse_a_gpu_without_a_driver_before_they_start_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(device, "_DRIVERS", (tmp_path / "driver",))
    monkeypatch.setattr("asyncio.create_subprocess_exec", None)
    done = CliRunner().invoke(main, [command, "--device", "cuda:1"])
    assert done.exit_code == 2
    assert f"device 'cuda:1' needs a GPU, but this machine has no GPU driver (none of {tmp_path}" in done.output
    (tmp_path / "driver").touch()
    device.check_driver("cuda:1")
    for other in ("auto", "cpu"):
        device.check_driver(other)


@pytest.mark.parametrize("command", ["latency", "throughput", "kernels"])
def test_benchmarks_refuse_a_missing_gpu_in_one_line(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, ["bench", command, "--model", "tiny", "--device", "cuda"])
    assert done.exit_code == 2
    assert "needs a GPU, but torch detects none" in done.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch detects no GPU")
def test_an_engine_on_a_gpu_gives_the_tokens_of_the_cpu() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    made = [
        LLM("tiny", device=where, dtype="float32", kv_memory=8 << 20).generate(["hello", "a longer one"], greedy)
        for where in ("cuda", "cpu")
    ]
    assert [c.token_ids for c in made[0]] == [c.token_ids for c in made[1]]
