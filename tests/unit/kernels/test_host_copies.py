"""Copies between pages and their mirror: one call for each run of pages, after the steps, and complete on return."""

import pytest
import torch

from kvferry.core.errors import UsageError
from kvferry.kernels.block_moves import Run, runs
from kvferry.kernels.host_copies import CudaCopyStream, HostCopies, pin


class Recorded:
    """A stream that records its calls and copies at `wait`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def after_steps(self) -> None:
        self.calls.append("after_steps")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls.append(f"copy {len(target)}")
        self.copies.append((target, source))

    def wait(self) -> None:
        self.calls.append("wait")
        for target, source in self.copies:
            target.copy_(source)
        self.copies.clear()


def pages_of(count: int) -> torch.Tensor:
    return torch.arange(count * 2 * 3, dtype=torch.float32).view(count, 2, 3)


def test_each_run_is_one_call_after_the_steps() -> None:
    assert runs([4, 5, 6, 1, 2, 9]) == [Run(4, 0, 3), Run(1, 3, 2), Run(9, 5, 1)]
    pages, stream = pages_of(10), Recorded()
    host = memoryview(bytearray(pages.numel() * 4))
    copies = HostCopies(pages, host, stream)
    copies.to_host([4, 5, 6, 1, 2, 9])
    assert stream.calls == ["after_steps", "copy 3", "copy 2", "copy 1", "wait"]
    mirrored = torch.frombuffer(host, dtype=torch.float32).view(pages.shape)
    expected = torch.zeros_like(pages)
    expected[[4, 5, 6, 1, 2, 9]] = pages[[4, 5, 6, 1, 2, 9]]
    assert torch.equal(mirrored, expected)
    mirrored[7] = 1.5
    stream.calls.clear()
    copies.to_device([7])
    assert stream.calls == ["after_steps", "copy 1", "wait"]
    assert torch.equal(pages[7], torch.full((2, 3), 1.5))
    assert torch.equal(pages[4], expected[4])


@pytest.mark.parametrize("blocks", [[10], [-1], [0, 11]])
def test_pages_that_do_not_exist_are_refused(blocks: list[int]) -> None:
    pages, stream = pages_of(10), Recorded()
    copies = HostCopies(pages, memoryview(bytearray(pages.numel() * 4)), stream)
    for copy in (copies.to_host, copies.to_device):
        with pytest.raises(UsageError, match="out of range: the pool has 10 pages"):
            copy(blocks)
    assert stream.calls == []


def test_a_mirror_of_another_size_and_pages_that_are_not_contiguous_are_refused() -> None:
    pages = pages_of(4)
    with pytest.raises(UsageError, match="the mirror must have 96 bytes like the pages, not 8"):
        HostCopies(pages, memoryview(bytearray(8)), Recorded())
    with pytest.raises(UsageError, match="not contiguous"):
        HostCopies(pages.transpose(1, 2), memoryview(bytearray(96)), Recorded())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch detects no GPU")
def test_copies_of_a_gpu_are_ordered_after_its_steps() -> None:
    pages = torch.zeros(64, 1 << 18, dtype=torch.float32, device="cuda")
    host = memoryview(bytearray(pages.numel() * 4))
    pin(host)
    copies = HostCopies(pages, host, CudaCopyStream(pages.device))
    busy = torch.randn(4096, 4096, device="cuda")
    for turn in range(1, 4):
        for _ in range(8):
            busy = torch.tanh(busy @ busy)
        pages.fill_(turn)  # launched after the products, so it runs late
        copies.to_host(list(range(64)))
        assert float(torch.frombuffer(host, dtype=torch.float32).min()) == turn
