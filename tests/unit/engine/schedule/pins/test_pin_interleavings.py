"""Random interleavings of pins, renewals, unpins, expiries and requests that fill the pool."""

from dataclasses import dataclass, field

from harness.engines.pinner import Pinner
from harness.fakes.engines import a_request, a_windowed_engine, an_engine, expected_tokens, small_limits
from harness.idle import assert_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.errors import Overloaded
from kvferry.core.ids import RequestId
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import PinnedPrefix

BLOCK = 4
PREFIXES = [
    [7, *range(11)],
    [7, *range(7), 50, 51, 52, 53],
    [8, *range(19)],
    [9, *range(30)],
    [7, *range(23)],
    [10, *range(4)],
]
"""Prefixes of 1 to 7 blocks, some with a common beginning."""

Operation = tuple[str, int, float]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("pin"), st.integers(0, len(PREFIXES) - 1), st.sampled_from([1.0, 5.0, 60.0])),
        st.tuples(st.just("unpin"), st.integers(0, len(PREFIXES) - 1), st.just(0.0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0.0)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.4, 2.0, 30.0])),
        st.tuples(st.just("steps"), st.integers(1, 6), st.just(0.0)),
        st.tuples(st.just("request"), st.integers(0, len(PREFIXES) - 1), st.just(0.0)),
        st.tuples(st.just("fill"), st.integers(10, 56), st.just(0.0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0.0)),
    ),
    max_size=60,
)


@dataclass
class Model:
    """Deadlines of the pins that must exist, beside an engine."""

    engine: Engine
    clock: ManualClock
    pinner: Pinner
    deadlines: dict[bytes, float] = field(default_factory=dict)
    """Deadline of each pin by its name."""
    sent: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    """Prefix and deadline of each pin that was sent."""
    prefixes: dict[bytes, list[int]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_checked: int = 0

    def take_replies(self) -> None:
        for name in list(self.pinner.replies):
            reply = self.pinner.replies.pop(name)
            if isinstance(reply, PinnedPrefix):
                prefix, deadline = self.sent[name]
                self.deadlines[reply.name] = max(deadline, self.deadlines.get(reply.name, 0.0))
                self.prefixes[reply.name] = prefix[: len(prefix) // BLOCK * BLOCK]
            else:
                assert isinstance(reply, Overloaded), reply

    def check(self) -> None:
        """Check that each pin that must exist is a hit now, and that the quota is kept."""
        self.take_replies()
        self.engine.check_integrity()
        allocator = self.engine.allocator
        for name, deadline in self.deadlines.items():
            if deadline > self.clock.now:
                prefix = self.prefixes[name]
                names = self.engine.namer("").chain(prefix)
                assert len(allocator.peek(names, prefix, max_tokens=len(prefix))) == len(names)
                self.num_checked += 1
        live = sum(deadline > self.clock.now for deadline in self.deadlines.values())
        assert live <= self.engine.load().pins <= len(self.deadlines)

    def step(self) -> None:
        for update in self.engine.step().updates:
            if update.request_id in self.prompts:
                self.tokens.setdefault(update.request_id, []).extend(t.token_id for t in update.tokens)
        self.deadlines = {name: end for name, end in self.deadlines.items() if end > self.clock.now}
        self.check()

    def apply(self, operation: Operation) -> None:
        kind, number, amount = operation
        if kind == "pin":
            name = f"pin{self.pinner.num_sent}"
            self.sent[name] = (PREFIXES[number], self.clock.now + amount)
            self.pinner.send(PREFIXES[number], amount)
        elif kind == "unpin":
            ended = self.engine.pinning.unpin("", PREFIXES[number])
            if ended is not None:
                self.deadlines.pop(ended.name, None)
        elif kind == "abort":
            self.engine.abort(RequestId(f"pin{number}"))
        elif kind == "wait":
            self.clock.advance(amount)
        elif kind == "reset":
            self.engine.reset_prefix_cache()
            self.deadlines.clear()
        elif kind == "steps":
            for _ in range(number):
                self.step()
        else:
            name = f"r{len(self.prompts)}"
            tokens = [*PREFIXES[number], 3] if kind == "request" else [len(self.prompts) % 30 + 20] * number
            self.prompts[name] = tokens
            self.engine.add(a_request(name, tokens, max_tokens=3))
        self.check()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        for name, prompt in self.prompts.items():
            assert self.tokens[name] == expected_tokens(prompt, 3), "pins change no output and stop no request"
        assert_idle(self.engine)
        self.clock.advance(61.0)
        self.engine.step()
        assert self.engine.allocator.pool.is_idle
        assert self.engine.load().pins == 0


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, share=st.sampled_from([0.1, 0.3, 1.0]))
def test_pinned_blocks_are_always_cached_within_the_quota_and_none_leak(
    operations: list[Operation], share: float
) -> None:
    clock = ManualClock()
    engine, _ = an_engine(
        num_blocks=24,
        max_model_tokens=60,
        limits=small_limits(max_chunk_tokens=12, max_num_seqs=4),
        pin_share=share,
        clock=clock,
    )
    model = Model(engine, clock, Pinner(engine))
    for operation in operations:
        model.apply(operation)
    model.finish()


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_pinned_blocks_of_layers_with_windows_are_always_cached(operations: list[Operation]) -> None:
    clock = ManualClock()
    engine, _ = a_windowed_engine(
        (None, 6), num_blocks=48, max_model_tokens=60, limits=small_limits(max_chunk_tokens=12, max_num_seqs=4)
    )
    engine._clock = engine.pinning._clock = clock
    model = Model(engine, clock, Pinner(engine))
    for operation in operations:
        model.apply(operation)
    model.finish()


def test_the_model_checks_live_pins() -> None:
    clock = ManualClock()
    engine, _ = an_engine(num_blocks=24, max_model_tokens=60, pin_share=0.3, clock=clock)
    model = Model(engine, clock, Pinner(engine))
    for operation in (("pin", 0, 60.0), ("steps", 3, 0.0), ("fill", 50, 0.0), ("steps", 3, 0.0)):
        model.apply(operation)
    assert model.num_checked > 3
    model.finish()
