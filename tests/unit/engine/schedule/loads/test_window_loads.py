"""Hand-offs between engines that release pages behind windows: a ticket has what the next rows read, in every group."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from harness.fakes.engines import (
    WindowedRunner,
    a_request,
    a_windowed_engine,
    attach,
    expected_tokens,
    run_until_idle,
    small_limits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import BlockId, RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.interface.connector import LoadOutcome
from kvferry.kv.pages.layer_groups import handed_over

Windows = tuple[int | None, ...]


class CopyingLoader:
    """A loader that copies the entries of an export from another engine's pages at once, or fails."""

    def __init__(self, engine: Engine, runner: WindowedRunner, peer: WindowedRunner) -> None:
        self._engine, self._runner, self._peer = engine, runner, peer
        self.copied: list[int] = []
        """Number of pages of each load."""
        self.fails = False
        attach(engine, loader=self)

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        assert isinstance(source, Export)
        pages = source.blocks[first_block:]
        assert len(pages) == len(targets), "the ticket's entries from the first one on are exactly what is needed"
        for theirs, ours in zip(pages, targets, strict=True):
            self._runner.pages[ours] = list(self._peer.pages[theirs])
        self.copied.append(len(targets))
        self._engine.post(LoadOutcome(request_id, job, "lost" if self.fails else None, len(targets), 0, 0.1))

    def cancel(self, request_id: RequestId) -> None:
        """Do nothing: a load has ended when it is cancelled."""

    @property
    def num_active(self) -> int:
        return 0


def computed(engine: Engine, name: str, prompt: list[int]) -> tuple[int, Export]:
    """Compute a prompt for a hand-off; return its first token and the export, which stays held."""
    engine.add(a_request(name, prompt, exports=True))
    while engine.has_work:
        for update in engine.step().updates:
            assert update.export is not None
            engine.check_integrity()
            return update.tokens[0].token_id, update.export
    raise AssertionError("no token was sampled")


def continued(engine: Engine, name: str, prompt: list[int], first: int, export: Export, count: int) -> list[int]:
    """Decode `count` tokens after the first one, with the KV of an export."""
    request = a_request(
        name, [*prompt, first], max_tokens=count + 1, num_generated=1, remote=RemoteKv(export.num_tokens, export)
    )
    engine.add(request)
    return [first, *run_until_idle(engine)[name]]


@pytest.mark.parametrize("windows", [(None, 6, 6), (None, 6, 20), (9,)])
def test_a_ticket_has_the_pages_that_the_next_row_reads(windows: Windows) -> None:
    p, p_runner = a_windowed_engine(windows)
    d, d_runner = a_windowed_engine(windows)
    loader = CopyingLoader(d, d_runner, p_runner)
    prompt = [i % 90 for i in range(50)]
    first, export = computed(p, "p", prompt)
    assert len(export.blocks) == sum(map(len, handed_over(50, windows, 4)))
    assert continued(d, "d", prompt, first, export, 8) == expected_tokens(prompt, 9)
    assert loader.copied == [len(export.blocks)]
    p.release_export(p.num_exports - 1)
    assert p.is_idle
    assert d.is_idle


def test_blocks_that_are_cached_for_full_attention_are_not_loaded_again() -> None:
    """This is so after a KV prefetch, and when the pages of a window were reused."""
    p, p_runner = a_windowed_engine((None, 6))
    d, d_runner = a_windowed_engine((None, 6))
    loader = CopyingLoader(d, d_runner, p_runner)
    prompt = [i % 90 for i in range(50)]
    first, export = computed(p, "p", prompt)
    continued(d, "one", prompt, first, export, 2)
    for name in d.namer("").chain(prompt):
        d.allocator.further_indexes[0].forget_name(name)
    assert continued(d, "two", prompt, first, export, 8) == expected_tokens(prompt, 9)
    whole = 13 + 3  # blocks 10 to 12 are in the window of 6 tokens before token 48
    assert loader.copied == [whole, whole - 12]
    d.add(a_request("three", [*prompt, 1, 2, 3], max_tokens=2))
    steps = len(d_runner.steps)
    run_until_idle(d)
    assert d_runner.steps[steps].scheduled[0].num_computed == 48, "loaded blocks are cached in all groups"


def test_a_failed_load_is_computed() -> None:
    p, p_runner = a_windowed_engine((None, 6))
    d, d_runner = a_windowed_engine((None, 6))
    CopyingLoader(d, d_runner, p_runner).fails = True
    prompt = [i % 90 for i in range(50)]
    first, export = computed(p, "p", prompt)
    assert continued(d, "d", prompt, first, export, 8) == expected_tokens(prompt, 9)
    assert d_runner.steps[0].scheduled[0].num_computed == 0


def test_the_full_blocks_of_a_turn_are_kept_for_a_peer() -> None:
    d, d_runner = a_windowed_engine((None, 6))
    p, p_runner = a_windowed_engine((None, 6))
    CopyingLoader(p, p_runner, d_runner)
    prompt = [i % 90 for i in range(41)]
    d.add(replace(a_request("d", prompt, max_tokens=10), keeps=True))
    updates = []
    while d.has_work:
        updates += d.step().updates
    kept = updates[-1].kept
    assert kept is not None
    assert kept.num_tokens == 48
    assert len(kept.blocks) == 12 + 2
    turn = [*prompt, *expected_tokens(prompt, 10), 5, 6, 7]
    p.add(a_request("p", turn, max_tokens=3, remote=RemoteKv(kept.num_tokens, kept)))
    assert run_until_idle(p)["p"] == expected_tokens(turn, 3)
    assert p_runner.steps[0].scheduled[0].num_computed == 48


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Windows, int, int, list[tuple[list[int], int]]]:
    windows = (draw(st.one_of(st.none(), st.integers(1, 20))), *draw(st.lists(st.integers(1, 20), max_size=2)))
    prefix = [(7 * i) % 5 for i in range(draw(st.integers(0, 30)))]
    tails = st.lists(st.integers(0, 3), min_size=1, max_size=12)
    requests = draw(
        st.lists(st.tuples(tails.map(lambda tail: [*prefix, *tail]), st.integers(1, 6)), min_size=1, max_size=4)
    )
    return windows, draw(st.integers(1, 5)), draw(st.integers(1, 12)), requests


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_hand_offs_with_any_windows_and_cached_prefixes_give_the_right_tokens(
    case: tuple[Windows, int, int, list[tuple[list[int], int]]],
) -> None:
    """The runners check that all rows read what was computed for them, on either side."""
    windows, block_tokens, chunk, requests = case
    limits = small_limits(max_chunk_tokens=chunk)
    p, p_runner = a_windowed_engine(windows, num_blocks=200, block_tokens=block_tokens, limits=limits)
    d, d_runner = a_windowed_engine(windows, num_blocks=80, block_tokens=block_tokens, limits=limits)
    CopyingLoader(d, d_runner, p_runner)
    for number, (prompt, count) in enumerate(requests):
        if d.allocator.needs.pages_for(len(prompt) + count + 1) > 80:
            continue
        first, export = computed(p, f"p{number}", prompt)
        assert continued(d, f"d{number}", prompt, first, export, count) == expected_tokens(prompt, count + 1)
        p.release_export(p.num_exports - 1)
        p.check_integrity()
    assert p.is_idle
    assert d.is_idle
