"""Timing by a device's events, and by a clock where there is no device."""

import pytest
import torch
from harness.device.host_timer import HostTimer

from kvferry.bench.formulas.gpu_work import OPERATIONS, SMALL, GpuTiming
from kvferry.bench.gpu import kernels
from kvferry.bench.gpu.session import Session, about_now
from kvferry.bench.gpu.timing import CudaTimer, rates_of
from kvferry.core.clock import ManualClock

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch detects no GPU")


def test_the_host_s_timer_leaves_the_first_run_out() -> None:
    clock, took = ManualClock(), iter([9.0, 1.0, 3.0, 2.0])

    def action() -> torch.Tensor:
        clock.advance(next(took))
        return torch.zeros(1)

    assert HostTimer(clock, 3)(action) == GpuTiming(median=2.0, low=1.0, high=3.0, count=3)


@pytest.mark.gpu
@needs_gpu
def test_events_time_calls_with_and_without_capture() -> None:
    device = torch.device("cuda")
    timer = CudaTimer(device, seconds=0.01)
    rates = rates_of(device, timer, copy_bytes=1 << 28, side=2048)
    assert rates.gbps > 10
    assert rates.tflops > 0.1
    values = torch.ones(1 << 20, device=device)
    asks = timer(lambda: values * float(values.sum()))  # the host waits for the sum
    assert 0 < asks.low <= asks.median <= asks.high


@pytest.mark.gpu
@needs_gpu
def test_every_operation_is_measured_on_a_gpu() -> None:
    device = torch.device("cuda")
    timer = CudaTimer(device, seconds=0.001)
    rates = rates_of(device, timer, copy_bytes=1 << 20, side=256)
    about = about_now(torch.cuda.get_device_name(device), ManualClock())
    rows = kernels.run(Session(device, torch.bfloat16, timer, rates, about, SMALL, print), (), print)
    assert tuple(dict.fromkeys(row.op for row in rows)) == OPERATIONS
    assert {row.op for row in rows if row.kernels == "torch"} >= {"silu_mul", "place_qkv", "sample"}
