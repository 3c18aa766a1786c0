"""The emulation of captured graphs has their limits: no host access, no temporary tensors, no reads of results."""

import pytest
import torch
from harness.fakes.tape import Asked, NothingAsked, TapeGraphs

from kvferry.kernels.gpu import rows


def test_a_replay_repeats_operations_over_the_same_memory_and_no_line_of_the_action() -> None:
    given, out, calls = torch.arange(4.0), torch.zeros(4), []

    def action() -> None:
        calls.append(len(calls))
        out.copy_(given.view(2, 2).add(1.0).reshape(-1) * len(calls))

    with torch.inference_mode():
        replay = TapeGraphs().capture(action)
        given.mul_(10)
        replay()
    assert calls == [0, 1]
    assert out.tolist() == [2.0, 22.0, 42.0, 62.0]


def test_kernels_are_repeated_in_their_place() -> None:
    gates, out = torch.zeros(2, 8), torch.zeros(2, 4)

    def action() -> None:
        out.copy_(rows.silu_mul(gates.add(0.0)).mul(2.0))

    replay = TapeGraphs().capture(action)
    gates.fill_(1.0)
    replay()
    assert out.flatten().tolist() == pytest.approx([2 / (1 + 2.718281828**-1)] * 8)


def test_uninitialized_memory_is_overwritten_before_a_replay() -> None:
    out = torch.zeros(3)

    def forgetful() -> None:
        out.copy_(torch.empty(3))

    TapeGraphs().capture(forgetful)()
    assert out.isnan().all()


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
    ],
    ids=["item", "tolist", "cpu", "bool", "nonzero", "mask", "masked_select"],
)
def test_reads_of_results_are_refused(ask: object) -> None:
    x = torch.ones(3)
    with pytest.raises(Asked), NothingAsked():
        ask(x)  # type: ignore[operator]
    with NothingAsked():
        assert rows.silu_mul(torch.ones(1, 2)).shape == (1, 1)
    assert x.tolist() == [1.0, 1.0, 1.0]
