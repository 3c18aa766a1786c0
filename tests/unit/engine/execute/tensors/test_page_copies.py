"""Pages that sequences share are copied before one of them writes: on every runner, in the order of the plan."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.fakes.engines import a_request, an_engine, expected_tokens, run_until_idle
from harness.fakes.forking import Forking, check_forks
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.blocks.page_copies import PageCopy, copy_rounds
from kvferry.kernels import compiled
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny

CONFIG = tiny.config()
PROMPT = [5, 17, 200, 31, 8, 90]


def runner_of(kernels: str, dtype: str) -> Runner:
    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype=dtype, kernels=kernels)
    return Runner(model, PagedKv.allocate(KvLayout.of(CONFIG, block_tokens=4, dtype=dtype), 32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("level", compiled.levels())
def test_siblings_stay_apart_on_the_compiled_kernels(level: str, dtype: str) -> None:
    check_forks(runner_of(f"compiled-{level}", dtype), PROMPT)


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_siblings_stay_apart_on_torch(kernels: str) -> None:
    check_forks(runner_of(kernels, "float32"), PROMPT)


def test_siblings_stay_apart_in_pages_that_are_a_tensor() -> None:
    """The pages are a tensor, as on a device whose memory the host cannot address."""
    model = build_model(CONFIG, tiny.TinyTensors(CONFIG), dtype="float32", kernels="torch")
    shape = KvLayout.of(CONFIG, block_tokens=4, dtype="float32")
    check_forks(Runner(model, PagedKv(shape, 32, pages=torch.zeros(32, *shape.dims))), PROMPT)


def test_a_sibling_s_write_leaves_the_shared_page_as_it_was() -> None:
    runner = runner_of("auto", "float32")
    forking = Forking(runner)
    parent = forking.start(PROMPT)
    forking.step([parent])
    shared = parent.table.blocks[1]
    before = runner.kv.pages[shared].clone()
    child = forking.fork(parent, 7)
    forking.step([child])
    assert torch.equal(runner.kv.pages[shared], before)
    copied = runner.kv.pages[child.table.blocks[1]]
    assert torch.equal(copied[..., :2, :], before[..., :2, :]), "the two prompt tokens in the page"
    assert not torch.equal(copied[..., 2, :], before[..., 2, :]), "the token of the child"


copies_of_eight = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]), max_size=12
)


@given(copies_of_eight)
def test_copies_of_a_round_may_run_in_any_order(
    pairs: list[tuple[int, int]],
) -> None:
    copies = [PageCopy(BlockId(a), BlockId(b)) for a, b in pairs]
    wanted = list(range(8))
    for copy in copies:
        wanted[copy.target] = wanted[copy.source]
    got = list(range(8))
    rounds = copy_rounds(copies)
    for group in rounds:
        targets = [c.target for c in group]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {c.source for c in group}
        for copy in reversed(group):
            got[copy.target] = got[copy.source]
    assert got == wanted
    assert [c for group in rounds for c in group] == copies


@given(copies_of_eight, st.booleans())
def test_page_memory_copies_in_the_order_of_the_plan(pairs: list[tuple[int, int]], is_tensor: bool) -> None:
    shape = KvLayout.of(CONFIG, block_tokens=4, dtype="float32")
    tensor = torch.zeros(8, *shape.dims)
    kv = PagedKv(shape, 8, pages=tensor) if is_tensor else PagedKv.allocate(shape, 8)
    kv.pages.copy_(torch.arange(8.0).view(8, 1, 1, 1, 1, 1).expand(8, *shape.dims))
    kv.copy_pages([PageCopy(BlockId(a), BlockId(b)) for a, b in pairs])
    wanted = np.arange(8.0)
    for source, target in pairs:
        wanted[target] = wanted[source]
    assert kv.pages.flatten(1).amin(1).tolist() == kv.pages.flatten(1).amax(1).tolist() == wanted.tolist()


@pytest.mark.parametrize("copy", [PageCopy(BlockId(8), BlockId(0)), PageCopy(BlockId(0), BlockId(-1))])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_page_that_does_not_exist_is_refused(copy: PageCopy, is_tensor: bool) -> None:
    shape = KvLayout.of(CONFIG, block_tokens=4, dtype="float32")
    kv = PagedKv(shape, 8, pages=torch.zeros(8, *shape.dims)) if is_tensor else PagedKv.allocate(shape, 8)
    with pytest.raises(InvariantBroken, match="of 8 pages"):
        kv.copy_pages([copy])


def test_copies_of_host_pages_load_no_torch() -> None:
    program = """
import sys
from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.page_copies import PageCopy
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
kv = PagedKv.allocate(KvLayout.of(tiny.config(), block_tokens=4, dtype="int8"), 4)
kv.copy_pages([PageCopy(BlockId(0), BlockId(1))])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_sequence_forked_mid_block_is_planned_with_its_copy_and_both_continue_as_alone() -> None:
    engine, runner = an_engine()
    prompt = [1, 2, 3, 4, 5, 6]
    engine.add(a_request("a", prompt, max_tokens=8))
    engine.step()
    scheduler, (parent,) = engine.scheduler, engine.scheduler._running
    child = replace(parent, request_id=RequestId("b"), tokens=[*prompt, 50], arrival=9, names=list(parent.names))
    child.table = engine.allocator.fork(parent.table)
    scheduler._known[child.request_id] = child
    scheduler._running.append(child)
    first = engine.step()
    engine.check_integrity()
    (copy,) = runner.steps[-1].copies
    assert (copy.source, copy.target) == (child.table.blocks[1], parent.table.blocks[1])
    tokens = {
        name: [t.token_id for u in first.updates if u.request_id == name for t in u.tokens] for name in ("a", "b")
    }
    for name, more in run_until_idle(engine).items():
        tokens[name] += more
    assert tokens == {"a": expected_tokens(prompt, 8)[1:], "b": expected_tokens([*prompt, 50], 7)}
    assert not any(plan.copies for plan in runner.steps[2:])
    assert engine.is_idle


def test_a_step_ahead_is_not_planned_over_a_shared_page() -> None:
    """A step ahead would lose the copy, because a plan that follows a running step has no copies."""
    engine, runner = an_engine()
    engine.add(a_request("a", [1, 2, 3, 4, 5], max_tokens=6))
    plan = engine.scheduler.schedule()
    (sequence,) = engine.scheduler._running
    held = engine.allocator.fork(sequence.table)
    assert engine.scheduler.follow(plan) is None
    assert sequence.table.blocks == held.blocks, "no block was copied for a step that is not planned"
    engine.scheduler.update(plan, runner.run(plan))
    second = engine.scheduler.schedule()
    assert [c.source for c in second.copies] == [held.blocks[1]]
    engine.scheduler.update(second, runner.run(second))
    engine.allocator.free(held)
    run_until_idle(engine)
    assert engine.is_idle
