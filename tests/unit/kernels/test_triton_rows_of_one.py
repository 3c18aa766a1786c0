"""Plans with lengths in device memory: results equal those of the host's plan, and padding has no effect."""

import numpy as np
import pytest
import torch
from harness.kernels.kernel_cases import Case, Cast, assert_as_good_as_reference, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.batch import AttentionBatch, AttentionRules, HeadNorms, SingleRows
from kvferry.kernels.gpu.attention import attend as attend_module
from kvferry.kernels.gpu.backend import DEVICE_OPS, OPS
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.gpu.launch import Choice
from kvferry.kernels.ops import DeviceOps, Ops
from kvferry.kernels.reference import forward as reference

CONTEXTS = st.lists(st.integers(1, 90), min_size=1, max_size=4)
UNUSED_PAGE = 1 << 30
"""Number of a page that does not exist."""


def described(case: Case, order: list[int], padding: int, device: torch.device | str) -> SingleRows:
    """Return the case with its sequences at rows `order` of the tables, and padding rows, which have the last table."""
    tables = np.full((len(order) + 1, case.batch.block_tables.shape[1]), UNUSED_PAGE, np.int32)
    tables[order] = case.batch.block_tables
    places = [*order, *[len(order)] * padding]
    contexts = [*case.batch.contexts.tolist(), *[0] * padding]
    return SingleRows(
        torch.from_numpy(tables).to(device),
        torch.tensor(places, device=device),
        torch.tensor(contexts, device=device),
        max_tokens=tables.shape[1] * case.pages.shape[4],
    )


def attended(
    ops: DeviceOps, case: Case, cast: Cast, order: list[int], padding: int, rules: AttentionRules
) -> torch.Tensor:
    pages = cast(case.pages)
    rows = described(case, order, padding, pages.device)
    q = cast(torch.cat((case.q, torch.ones(padding, *case.q.shape[1:]))))
    return ops.attend(q, pages, 1, ops.plan_rows(rows, pages, q.shape[1]), rules)


@settings(max_examples=20, deadline=None)
@given(
    contexts=CONTEXTS,
    padding=st.integers(0, 3),
    group=st.integers(1, 3),
    window=st.sampled_from([None, 1, 20]),
    programs=st.sampled_from([1, 4, 4096]),
    data=st.data(),
)
def test_results_are_those_of_the_host_s_plan(
    device: torch.device, contexts: list[int], padding: int, group: int, window: int | None, programs: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    order = data.draw(st.permutations(range(len(contexts))))
    case = make_case(
        [(1, c - 1) for c in contexts], kv_heads=2, group=group, head_dim=16, block_tokens=4, seed=3,
        unused=UNUSED_PAGE, spare_columns=2,
    ).poisoned()  # fmt: skip
    rules = AttentionRules(0.3, window=window)
    pages = case.pages.to(device)
    plan = OPS.plan_attention(case.to(device), pages, case.q.shape[1])
    expected = DEVICE_OPS.attend(case.q.to(device), pages, 1, plan, rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_module, "_OPEN_PROGRAMS", programs)
        got = attended(DEVICE_OPS, case, lambda t: t.to(device), order, padding, rules)
    assert torch.equal(got[: len(contexts)], expected)
    assert not got[len(contexts) :].any()


def test_the_reference_gives_the_same_results(device: torch.device) -> None:
    case = make_case([(1, 40), (1, 3), (1, 0)], kv_heads=2, group=2, head_dim=16, block_tokens=4, seed=5)
    assert_as_good_as_reference(
        lambda ops, cast: attended(ops, case, cast, [2, 0, 1], 2, AttentionRules(0.3)),
        torch.float32,
        DEVICE_OPS,
        definition=reference.DEVICE_OPS,
        device=device,
    )


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("backend", [OPS, reference.OPS], ids=lambda ops: ops.name)
def test_padding_writes_nowhere(device: torch.device, backend: Ops, has_norms: bool) -> None:
    where = device if backend is OPS else torch.device("cpu")
    pages = torch.full((3, 2, 2, 2, 4, 8), torch.nan, device=where)
    weight = torch.ones(8, device=where)
    norms = HeadNorms(weight, weight, 1e-6) if has_norms else None
    qkv = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1)).to(where)
    angles = torch.ones(3, 8, device=where)
    backend.place_qkv(qkv, norms, angles, angles, pages, 1, torch.tensor([-1, 6, -1], device=where))
    written = ~pages.isnan()
    assert written[1, 1, :, :, 2].all()
    assert int(written.sum()) == 2 * 2 * 8


def test_inconsistent_arguments_are_refused() -> None:
    pages = torch.zeros(2, 1, 2, 1, 4, 8)
    tables, one = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    cases = [
        (SingleRows(tables.long(), one, one, 4), "tables: the dtype must be torch.int32, not torch.int64"),
        (SingleRows(tables, one.int(), one, 4), "places: the dtype must be torch.int64, not torch.int32"),
        (SingleRows(tables, one, torch.zeros(2, dtype=torch.int64), 4), "contexts: the shape must be"),
        (SingleRows(tables, one, one, 13), "max_tokens: 13 tokens exceed tables of 3 blocks"),
    ]
    for rows, message in cases:
        with pytest.raises(BadKernelInput, match=message):
            DEVICE_OPS.plan_rows(rows, pages, 2)


def test_a_launch_has_fewer_programs_than_possible_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    run = Choice.run

    def seen(choice: Choice, kernel: object, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        grids.append(grid)
        run(choice, kernel, grid, *args, **constants)

    monkeypatch.setattr(Choice, "run", seen)
    pages, q = torch.zeros(2, 1, 2, 2, 4, 8), torch.zeros(3, 4, 8)
    contexts = torch.tensor([1, 2, 3])
    rows = SingleRows(torch.zeros(1, 25_000, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), contexts, 100_000)
    DEVICE_OPS.attend(q, pages, 0, DEVICE_OPS.plan_rows(rows, pages, 4), AttentionRules(0.3))
    assert grids[0] == (3, 2, 4096 // 6)
    batch = AttentionBatch(np.array([1]), np.array([5]), np.zeros((1, 2), np.int64), torch.zeros(1, dtype=torch.int64))
    DEVICE_OPS.attend(q[:1], pages, 0, OPS.plan_attention(batch, pages, 4), AttentionRules(0.3))
    assert grids[-2] == (1, 2, 1)
