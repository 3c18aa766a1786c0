"""`kvferry profile worker` on a running worker: its steps while it serves."""

import json
from pathlib import Path

from harness.servers.processes import a_worker, running
from harness.servers.worker_channel import worker_channel

from kvferry.engine.observe.log_file import read_log
from kvferry.simulator.worker.step_replay import StepReplay
from kvferry.v1 import common_pb2, inference_pb2, inference_pb2_grpc

SECONDS = 60.0


def test_the_steps_of_a_serving_worker_are_recorded_and_replayed(tmp_path: Path) -> None:
    files = ("--log", str(tmp_path / "log"), "--trace", str(tmp_path / "trace"))
    with a_worker("both") as worker:
        addresses = worker.events["listening"]
        call = (
            "profile",
            "worker",
            str(addresses["admin"]),
            "--steps",
            "20",
            "--timeout",
            "30",
            "--reset-cache",
            *files,
        )
        with running(*call) as profiling:
            while profiling.process.poll() is None:
                generate(str(addresses["grpc"]), "Hello")
            assert profiling.process.returncode == 0
    log = read_log((tmp_path / "log").read_text().splitlines())
    assert sum(bool(step.plan) for step in log.steps) == 20
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
    if not log.obstacle:  # an obstacle means that a request was running when the recording began
        assert StepReplay(log).run().difference is None


def generate(address: str, text: str) -> None:
    request = inference_pb2.GenerateRequest(text=text, sampling=common_pb2.SamplingParams(max_tokens=8))
    with worker_channel(address) as channel:
        for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=SECONDS):
            pass
