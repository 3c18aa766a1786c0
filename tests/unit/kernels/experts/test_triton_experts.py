"""Experts of the Triton backend: products equal the reference, tokens equal those of the torch backend, no
synchronization.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.kernel_cases import Cast, assert_as_good_as_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.kernels.test_captured_steps import (
    GREEDY,
    Quiet,
    generated,
    model_on,
    nothing_asked,
    pages_for,
    plain_runner,
    runner_on,
)

from kvferry.engine.execute.models.build import resolve_kernels
from kvferry.engine.execute.models.mixture import choose_experts
from kvferry.engine.execute.run.runner import Runner
from kvferry.kernels.batch import ExpertWeights
from kvferry.kernels.gpu.backend import OPS
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.ops import Ops
from kvferry.kernels.unfused import clamped_swiglu
from kvferry.model import tiny
from kvferry.weights.config import Activation, Experts, ModelConfig

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
FEW = settings(max_examples=15, deadline=None)
MIXED = Experts(6, 2, 24, renormalizes=True)
CONFIGS = {
    "mixture": replace(tiny.config(), experts=MIXED),
    "shared expert, plain layer": replace(
        tiny.config(), experts=replace(MIXED, shared_size=16, renormalizes=False, dense_layers=(0,))
    ),
    "biases, clamped gates, sinks": replace(
        tiny.config(qkv_bias=True),
        experts=replace(MIXED, has_biases=True),
        activation=Activation.CLAMPED_SWIGLU,
        swiglu_limit=0.5,
        attention_sinks=True,
        output_bias=True,
        windows=(None, 20),
    ),
}


def weights_of(experts: int, hidden: int, inner: int, *, has_biases: bool) -> list[torch.Tensor]:
    biases = [torch.randn(experts, 2 * inner), torch.randn(experts, hidden)] if has_biases else []
    return [
        torch.randn(experts, 2 * inner, hidden) / hidden**0.5,
        torch.randn(experts, hidden, inner) / inner**0.5,
        *biases,
    ]


def packed(parts: list[torch.Tensor], cast: Cast) -> ExpertWeights:
    gate_up, down, *biases = map(cast, parts)
    first, last = biases or (None, None)
    return ExpertWeights(gate_up, first, down, last)


@FEW
@given(
    rows=st.sampled_from([0, 1, 3, 40]),
    experts=st.sampled_from([1, 3, 9]),
    active=st.integers(1, 3),
    hidden=st.sampled_from([5, 33, 64]),
    inner=st.sampled_from([3, 16, 40]),
    has_biases=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 1 << 16),
)
def test_sums_of_experts_are_those_of_the_definition(
    device: torch.device,
    rows: int,
    experts: int,
    active: int,
    hidden: int,
    inner: int,
    has_biases: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    active = min(active, experts)
    x, parts = torch.randn(rows, hidden), weights_of(experts, hidden, inner, has_biases=has_biases)
    # Some experts get no row, and some get nearly all.
    shares, chosen = choose_experts(torch.randn(rows, experts) * 3, Experts(experts, active, inner, renormalizes=False))

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        given_x = cast(x)
        at = given_x.device
        assert ops.run_experts is not None
        gate = partial(clamped_swiglu, alpha=1.7, limit=1.0) if has_biases else ops.silu_mul
        return ops.run_experts(given_x, chosen.to(at), shares.to(at), packed(parts, cast), gate)

    assert_as_good_as_reference(run, dtype, OPS, device=device)


def test_all_rows_of_one_expert_fill_several_tiles(device: torch.device) -> None:
    parts = weights_of(4, 32, 16, has_biases=False)
    x, chosen, shares = torch.randn(70, 32), torch.full((70, 1), 2), torch.ones(70, 1)

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        given_x = cast(x)
        at = given_x.device
        assert ops.run_experts is not None
        return ops.run_experts(given_x, chosen.to(at), shares.to(at), packed(parts, cast), ops.silu_mul)

    assert_as_good_as_reference(run, torch.float32, OPS, device=device)


def test_experts_do_not_synchronize_with_the_device(device: torch.device) -> None:
    parts = packed(weights_of(5, 32, 16, has_biases=True), lambda t: t.to(device))
    x, chosen = torch.randn(9, 32, device=device), torch.randint(0, 5, (9, 1), device=device)
    shares = torch.ones(9, 1, device=device)
    assert OPS.run_experts is not None
    with nothing_asked(device):
        OPS.run_experts(x, chosen, shares, parts, OPS.silu_mul)


@pytest.mark.parametrize("name", ["biases, clamped gates, sinks", "shared expert, plain layer"])
def test_a_step_has_the_results_of_the_torch_family(device: torch.device, name: str) -> None:
    ours, theirs = (
        generate(Runner(model, pages_for(model)), [list(range(40, 59))], 1)[0].tokens
        for model in (model_on(device, CONFIGS[name]), model_on(torch.device("cpu"), CONFIGS[name], "torch"))
    )
    assert ours == theirs


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_give_the_torch_family_s_tokens(device: torch.device, name: str) -> None:
    config = CONFIGS[name]
    runner = runner_on(device, config, piece_rows=(16,))
    runner.capture_all()
    assert generated(runner, GREEDY) == generated(plain_runner(config), GREEDY)
    assert isinstance(runner, Quiet)
    assert runner.num_quiet > 4


def test_gpus_take_experts() -> None:
    config: ModelConfig = CONFIGS["mixture"]
    assert resolve_kernels("auto", config, "bfloat16", "cuda") == "triton"
    assert resolve_kernels("triton", config, "bfloat16") == "triton"


X = torch.zeros(2, 8)
GOOD = packed(weights_of(3, 8, 4, has_biases=True), lambda t: t)
CHOSEN, SHARES = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "chosen of 32 bits": (lambda: call(chosen=CHOSEN.int()), "chosen: the dtype must be torch.int64, not torch.int32"),
    "chosen of other rows": (lambda: call(chosen=CHOSEN[:1]), r"chosen: \(1, 1\) is not \[2, A\]"),
    "shares of 64 bits": (
        lambda: call(shares=SHARES.double()),
        "shares: the dtype must be torch.float32, not torch.float64",
    ),
    "rows of another width": (lambda: call(x=X[:, :4]), r"x: the shape must be \(2, 8\), not \(2, 4\)"),
    "weights of another type": (lambda: call(weights=replace(GOOD, down=GOOD.down.half())), "down: torch.float16"),
    "biases of other experts": (
        lambda: call(weights=replace(GOOD, down_bias=torch.zeros(2, 8))),
        r"down_bias: the shape must be \(3, 8\), not \(2, 8\)",
    ),
    "transposed matrices": (
        lambda: call(weights=replace(GOOD, gate_up=torch.zeros(3, 8, 8).transpose(1, 2))),
        "gate_up: the tensor of shape .* has strides",
    ),
}


def call(
    x: torch.Tensor = X,
    chosen: torch.Tensor = CHOSEN,
    shares: torch.Tensor = SHARES,
    weights: ExpertWeights = GOOD,
) -> torch.Tensor:
    assert OPS.run_experts is not None
    return OPS.run_experts(x, chosen, shares, weights, OPS.silu_mul)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, message = BAD[name]
    with pytest.raises(BadKernelInput, match=message):
        run()
