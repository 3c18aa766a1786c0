"""Order of the mirror's copies: a row has one writer at a time, and a reader never gets outdated content."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.engine.execute.gpu.host_mirror import HostMirror
from kvferry.kv.interface.mirror import CopyError


class Gated:
    """Copies that begin when they are requested and end when the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.log: list[tuple[str, list[int]]] = []
        self.error: Exception | None = None
        self.seconds = 20.0

    def to_host(self, blocks) -> None:
        self._copy("host", blocks)

    def to_device(self, blocks) -> None:
        self._copy("device", blocks)

    def _copy(self, kind: str, blocks) -> None:
        self.begun.set()
        assert self.gate.wait(self.seconds)
        if self.error is not None:
            raise self.error
        self.log.append((kind, list(blocks)))


@pytest.fixture
def gated():
    copies = Gated()
    yield copies
    copies.gate.set()


def test_settling_waits_for_the_copies_requested_before(gated: Gated) -> None:
    mirror = HostMirror(gated, [0] * 8)
    with ThreadPoolExecutor(2) as callers:
        copying = callers.submit(mirror.to_host, [1, 2], None)
        assert gated.begun.wait(20)
        settled = callers.submit(mirror.settle)
        assert not settled.done()
        assert not copying.done()
        gated.gate.set()
        settled.result(20)
        assert gated.log == [("host", [1, 2])]
        copying.result(20)
    mirror.close()


def test_pages_whose_epoch_has_changed_are_not_copied(gated: Gated) -> None:
    epochs = [5, 6, 7]
    mirror = HostMirror(gated, epochs)
    with ThreadPoolExecutor(3) as callers:
        first = callers.submit(mirror.to_device, [0])
        assert gated.begun.wait(20)
        second = callers.submit(mirror.to_host, [0, 1, 2], [5, 6, 7])
        epochs[1] = 8  # the page is allocated again while the copy waits
        gated.gate.set()
        first.result(20)
        second.result(20)
    assert gated.log == [("device", [0]), ("host", [0, 2])]
    mirror.to_host([1], [6])
    assert len(gated.log) == 2, "the page has a newer epoch"
    mirror.to_host([1], None)
    assert gated.log[-1] == ("host", [1]), "pages that the caller holds are copied in any epoch"
    mirror.close()


def test_a_full_page_is_copied_once_in_an_epoch(gated: Gated) -> None:
    """A second copy would write to a row of the mirror while a peer reads it."""
    gated.gate.set()
    epochs = [5, 6, 7]
    mirror = HostMirror(gated, epochs)
    mirror.to_host([0, 1], [5, 6])
    mirror.to_host([0, 1, 2], [5, 6, 7], num_full=2)
    mirror.to_host([2], [7], num_full=0)
    assert gated.log == [("host", [0, 1]), ("host", [2]), ("host", [2])]
    epochs[1] = 8
    mirror.to_host([0, 1], None)
    assert gated.log[3:] == [("host", [1])]
    gated.error = RuntimeError("lost")
    with pytest.raises(CopyError):
        mirror.to_host([2], [7])
    gated.error = None
    mirror.to_host([2], [7])
    assert gated.log[4:] == [("host", [2])], "a failed copy is repeated"
    mirror.close()


def test_copies_are_made_in_the_order_of_the_requests(gated: Gated) -> None:
    mirror = HostMirror(gated, [0] * 8)
    gated.gate.set()
    for number in range(8):
        (mirror.to_host if number % 2 else mirror.to_device)([number], *([None] if number % 2 else []))
    assert [blocks for _, blocks in gated.log] == [[n] for n in range(8)]
    mirror.close()


def test_a_lost_device_fails_the_copy_and_a_stuck_one_does_so_in_time(gated: Gated) -> None:
    gated.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    stuck = HostMirror(gated, [0] * 8, seconds=0.05)
    with pytest.raises(CopyError, match=r"did not complete a copy of pages in 0\.05 s"):
        stuck.to_device([1])
    gated.gate.set()
    broken = HostMirror(gated, [0] * 8)
    with pytest.raises(CopyError, match="illegal memory access"):
        broken.to_host([1], None)
    assert gated.log == []
    stuck.close()
    broken.close()
    broken.close()
    with pytest.raises(CopyError, match="stopping"):
        broken.settle()


def without_settling(self) -> None:
    return None


def whatever_the_epoch(self, blocks, epochs, *, num_full=None) -> None:
    self._wait(lambda: self._copies.to_host(blocks))


def at_once(self, copy) -> None:
    copy()


MUTATIONS = {
    "settle returns at once": ("settle", without_settling, test_settling_waits_for_the_copies_requested_before),
    "epochs are not checked": ("to_host", whatever_the_epoch, test_pages_whose_epoch_has_changed_are_not_copied),
    "full pages are copied again": ("to_host", whatever_the_epoch, test_a_full_page_is_copied_once_in_an_epoch),
    "copies without a time limit": (
        "_wait",
        at_once,
        test_a_lost_device_fails_the_copy_and_a_stuck_one_does_so_in_time,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_rule_of_the_mirror_is_needed(gated: Gated, monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    name, replacement, check = MUTATIONS[mutation]
    monkeypatch.setattr(HostMirror, name, replacement)
    gated.seconds = 0.5
    with pytest.raises((AssertionError, RuntimeError)):
        check(gated)
