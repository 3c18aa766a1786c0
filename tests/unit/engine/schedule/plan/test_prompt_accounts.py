"""Every computed token of a prompt has one cause: what was missing, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from harness.engines.account_book import AccountBook
from harness.fakes.engines import a_request, an_engine, small_limits
from harness.fakes.loaders import HeldLoader
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.causes import ComputeCause
from kvferry.core.clock import ManualClock
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.core.pausing import PauseMode
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest, NewWeights
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.pricing.price import LoadPolicy, PriceBook

PROMPT = list(range(1, 19))
"""Four blocks of four tokens, and two more tokens."""
OTHER = list(range(40, 72))


class FailingLoader(HeldLoader):
    """A loader whose loads fail at once."""

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        super().start(job, request_id, source, first_block, targets)
        self.end("lost")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engine(clock: ManualClock) -> Iterator[Engine]:
    engine, _ = an_engine(num_blocks=10, clock=clock)
    yield engine
    assert engine.is_idle


def causes(engine: Engine, request: EngineRequest) -> dict[str, int]:
    """Run one request; return its computed tokens by cause."""
    book = AccountBook(engine)
    engine.add(request)
    while engine.has_work:
        book.stepped(engine.step().updates)
    return {str(cause): count for cause, count in book.reported[request.request_id].items()}


def test_a_new_prompt_has_new_blocks_and_a_part_of_one(engine: Engine) -> None:
    assert causes(engine, a_request("a", PROMPT)) == {"first_seen": 16, "partial_block": 2}


def test_the_last_token_of_a_full_block_makes_the_block_a_part(engine: Engine) -> None:
    assert causes(engine, a_request("a", PROMPT[:8])) == {"first_seen": 4, "partial_block": 4}
    assert causes(engine, a_request("b", PROMPT[:8])) == {"partial_block": 4}


def test_a_prompt_whose_pages_were_reused_is_evicted_and_the_report_says_when(
    engine: Engine, clock: ManualClock
) -> None:
    causes(engine, a_request("a", PROMPT, max_tokens=1))
    causes(engine, a_request("b", OTHER, max_tokens=1))
    clock.advance(30.0)
    engine.add(a_request("c", PROMPT, max_tokens=1))
    (update,) = engine.step().updates
    assert update.num_cached == 8, "the beginning is evicted last"
    found = {one.cause: (one.num_tokens, one.seconds) for one in update.computed}
    assert found == {ComputeCause.EVICTED: (8, 30.0), ComputeCause.PARTIAL_BLOCK: (2, 0.0)}


def test_a_longer_prompt_is_evicted_up_to_its_first_new_block(engine: Engine) -> None:
    causes(engine, a_request("a", PROMPT, max_tokens=1))
    causes(engine, a_request("b", OTHER, max_tokens=1))
    found = causes(engine, a_request("c", [*PROMPT[:12], *range(70, 80)], max_tokens=1))
    assert found == {"evicted": 4, "first_seen": 8, "partial_block": 2}


def test_a_reset_drops_the_blocks(engine: Engine) -> None:
    causes(engine, a_request("a", PROMPT))
    engine.reset_prefix_cache()
    assert causes(engine, a_request("b", PROMPT)) == {"dropped": 16, "partial_block": 2}
    assert causes(engine, a_request("c", PROMPT)) == {"partial_block": 2}


def test_other_weights_drop_the_blocks_although_their_names_change(engine: Engine) -> None:
    causes(engine, a_request("a", PROMPT))
    engine.pausing.pause(PauseMode.WAIT)
    engine.change_weights(NewWeights(name="v2", fingerprint=b"2" * 32, install=lambda: None))
    engine.pausing.resume()
    assert causes(engine, a_request("b", [*PROMPT[:8], *OTHER[:8]])) == {
        "dropped": 8, "first_seen": 4, "partial_block": 4,
    }  # fmt: skip


def test_scopes_reveal_nothing_of_each_other(engine: Engine) -> None:
    causes(engine, a_request("a", PROMPT, scope="a"))
    expected = {"first_seen": 16, "partial_block": 2}
    assert causes(engine, a_request("b", PROMPT, scope="b")) == expected
    causes(engine, a_request("c", OTHER, scope="c"))
    assert causes(engine, a_request("d", PROMPT, scope="d")) == expected


def test_rows_that_the_request_asks_for_are_computed_although_they_are_cached(engine: Engine) -> None:
    causes(engine, a_request("a", PROMPT))
    assert causes(engine, a_request("b", PROMPT, prompt_logprobs=0)) == {"rows_requested": 16, "partial_block": 2}
    mean = EngineRequest.for_vector(RequestId("c"), PROMPT, PoolingParams(Pooling.MEAN))
    assert causes(engine, mean) == {"rows_requested": 16, "partial_block": 2}
    last = EngineRequest.for_vector(RequestId("d"), PROMPT, PoolingParams(Pooling.LAST))
    assert causes(engine, last) == {"partial_block": 2}


def test_a_request_that_continues_elsewhere_is_resumed(engine: Engine) -> None:
    moved = a_request("a", [*PROMPT, 5, 6, 7], num_generated=3, max_tokens=5)
    assert causes(engine, moved) == {"resumed": 18}


def test_a_preempted_prompt_is_counted_again_and_apart() -> None:
    engine, _ = an_engine(num_blocks=12, limits=small_limits())
    book = AccountBook(engine)
    engine.add(a_request("old", list(range(20)), max_tokens=28))
    engine.add(a_request("young", list(range(40, 60)), max_tokens=8))
    while engine.has_work:
        book.stepped(engine.step().updates)
    found = {str(cause): count for cause, count in book.reported[RequestId("young")].items()}
    again = found.pop("preempted")
    assert 0 < again <= 20
    assert found == {"first_seen": 16, "partial_block": 4}


@pytest.mark.parametrize("num_tokens", [16, 18])
def test_a_failed_load_is_the_cause_of_all_its_tokens(engine: Engine, num_tokens: int) -> None:
    engine._prices = PriceBook(LoadPolicy.ALWAYS)
    FailingLoader(engine)
    moved = a_request("a", [*PROMPT, 5], num_generated=1, max_tokens=3)
    found = causes(engine, replace(moved, remote=RemoteKv(num_tokens, object())))
    rest = {"partial_block": 2} if num_tokens == 16 else {}
    assert found == {"load_failed": num_tokens, **rest}


def test_a_load_that_takes_longer_than_computing_is_dearer(engine: Engine) -> None:
    engine._prices = PriceBook(LoadPolicy.PRICE)
    FailingLoader(engine)
    for num_bytes in (100, 200, 400, 800):
        engine._prices.observe_load("peer", num_bytes, 100.0)
    request = a_request("a", [*PROMPT, 5], num_generated=1, max_tokens=3)
    found = causes(engine, replace(request, remote=RemoteKv(18, object())))
    assert found == {"load_dearer": 18}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(6, 16),
    st.integers(3, 64),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 12), st.integers(1, 8)), max_size=12),
    st.lists(st.sampled_from(["step", "step", "step", "reset", "abort"]), max_size=30),
)
def test_sources_and_causes_sum_to_the_prompts(
    num_blocks: int, chunk: int, requests: list[tuple[int, int, int, int]], turns: list[str]
) -> None:
    engine, _ = an_engine(num_blocks=num_blocks, limits=small_limits(token_budget=chunk, max_num_seqs=3))
    book = AccountBook(engine)
    for number, (kind, length, shared, most) in enumerate(requests):
        prompt = [*PROMPT[:shared], *((7 * number + i) % 90 for i in range(length))]
        if len(prompt) + 1 > engine.max_model_tokens:
            continue
        name, scope = f"r{number}", ("", "adapter")[number % 2]
        engine.add(a_request(name, prompt, max_tokens=most, scope=scope, prompt_logprobs=0 if kind == 2 else None))
        for turn in turns[number::3]:
            if turn == "reset":
                engine.reset_prefix_cache()
            elif turn == "abort":
                engine.abort(RequestId(f"r{number - 1}"))
            else:
                book.stepped(engine.step().updates)
    while engine.has_work:
        book.stepped(engine.step().updates)
    book.check()
    assert engine.is_idle
