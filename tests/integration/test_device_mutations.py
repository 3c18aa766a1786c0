"""Each copy and each fence of the device mirror is needed: without it, requests on the stand-in device fail."""

import sys

import grpc
import pytest
from harness.device.late_device import LateRunner, LateStream
from harness.device.scenarios import evicted, hand_off, lost_copies, overlap, prefetch, prior_turn

from kvferry.engine import LLM
from kvferry.engine.execute.gpu.host_mirror import HostMirror
from kvferry.kernels.host_copies import HostCopies
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.pages.digests import page_digests
from kvferry.workers.handoff.page_publisher import PagePublisher


@pytest.fixture(scope="module")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kernels="torch", kv_memory=16 << 20)


def nothing(*_, **__) -> None:
    return None


def publish_only_in(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only one service publish the pages that it names to peers."""
    real = PagePublisher.publish

    async def publish(self, blocks, epochs, **more):
        caller = sys._getframe(1).f_code.co_filename
        return () if caller.endswith(module) else await real(self, blocks, epochs, **more)

    monkeypatch.setattr(PagePublisher, "publish", publish)


def digests_first(self, blocks, epochs, num_full):
    found = page_digests(self._pages, self._block_bytes, blocks)
    self._mirror.to_host(blocks, epochs, num_full=num_full)
    return tuple(found)


def rows_shifted(self, target, source, blocks) -> None:
    real_copy(self, target, source, [(block + 1) % len(target) for block in blocks])


def copy_among_steps(self, target, source) -> None:
    self.runner.trace.copy(len(target), stream="step")
    real_launch(self, target, source)


def begin_after_copies(self, plan):
    self.trace.settle()
    return real_begin(self, plan)


def failures_ignored(self, job):
    real_report(self, job)


real_copy = HostCopies._copy
real_launch = LateStream.copy
real_begin = LateRunner.begin
real_report = Fetcher._why_not_copied
MUTATIONS = {
    "copies before the steps": ("prefetch", LateStream, "after_steps", nothing),
    "copies that are not waited for": ("hand_off", LateStream, "wait", nothing),
    "pages of other rows": ("hand_off", HostCopies, "_copy", rows_shifted),
    "offers before the copy": ("hand_off", "prefill.py", None, None),
    "loads without a copy": ("hand_off", Fetcher, "_why_not_copied", nothing),
    "copies to the host that are skipped": ("hand_off", HostMirror, "to_host", nothing),
    "digests before the copy": ("digests", PagePublisher, "_publish", digests_first),
    "prior turns before the copy": ("prior_turn", "decode.py", None, None),
    "progress before the copy": ("prefetch", "transfer.py", None, None),
    "stores before the copy": ("evicted", HostMirror, "to_host", nothing),
    "tier loads without a copy": ("evicted", HostMirror, "to_device", nothing),
    "stores before the steps": ("evicted", LateStream, "after_steps", nothing),
    "copies on the stream of the steps": ("overlap", LateStream, "copy", copy_among_steps),
    "steps that wait for copies": ("overlap", LateRunner, "begin", begin_after_copies),
    "loads whose copies have failed": ("lost_copies", Fetcher, "_why_not_copied", failures_ignored),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_copy_and_its_order_is_needed(one_engine: LLM, monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    scenario, owner, name, replacement = MUTATIONS[mutation]
    if isinstance(owner, str):
        publish_only_in(owner, monkeypatch)
    else:
        monkeypatch.setattr(owner, name, replacement)
    scenarios = {
        "hand_off": lambda: hand_off(one_engine, "shm"),
        "digests": lambda: hand_off(one_engine, "shm", verify_kv="digest"),
        "prior_turn": lambda: prior_turn(one_engine),
        "prefetch": lambda: prefetch(one_engine, num_followed=12),
        "overlap": lambda: overlap(one_engine),
        "lost_copies": lambda: lost_copies(one_engine),
        "evicted": lambda: evicted(one_engine, "dram://?size=8MiB"),
    }
    with pytest.raises((AssertionError, grpc.RpcError)):
        scenarios[scenario]()
