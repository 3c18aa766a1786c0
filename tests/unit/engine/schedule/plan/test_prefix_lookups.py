"""A waiting sequence's cached prefix is looked up again exactly when the prefix cache has changed, also by windows."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_table import BlockTable
from kvferry.engine.schedule.plan.admission import cached_prefix
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest

NAMER = BlockNamers(b"seed").of("", fingerprint=b"layout", block_tokens=4)


def a_sequence(tokens: list[int]) -> Sequence:
    return Sequence(SequenceRequest(RequestId("r"), len(tokens), SamplingParams(), NAMER, 100, frozenset()), tokens)


def compute(allocator: Allocator, sequence: Sequence) -> None:
    """Put the sequence's full blocks into the cache, as if they had been computed, and free their pages."""
    table = BlockTable()
    if not allocator.grow(table, num_tokens=sequence.num_tokens):
        return
    parent = None
    for i, name in enumerate(sequence.name_blocks()):
        allocator.name_block(table, i, name, sequence.sampling.tokens[4 * i : 4 * i + 4], parent)
        parent = name
    allocator.free(table)


@given(
    st.sampled_from([(None,), (8,), (None, 8)]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(5, 20)), max_size=12),
)
def test_a_remembered_lookup_equals_a_new_one(windows: tuple[int | None, ...], computed: list[tuple[int, int]]) -> None:
    allocator = Allocator.create(12, block_tokens=4, windows=windows)
    waiting = a_sequence([0] * 20)
    for token, length in computed:
        compute(allocator, a_sequence([token] * length))
        assert cached_prefix(allocator, waiting) == cached_prefix(allocator, a_sequence([0] * 20))


def test_the_cache_is_searched_once_while_it_stays_the_same() -> None:
    allocator = Allocator.create(12, block_tokens=4)
    waiting = a_sequence([0] * 20)
    first = cached_prefix(allocator, waiting)
    assert cached_prefix(allocator, waiting) is first
    compute(allocator, a_sequence([0] * 8))
    assert len(cached_prefix(allocator, waiting)) == 2
    waiting.sampling.tokens.append(1)  # it was preempted after a token
    assert cached_prefix(allocator, waiting) is not first
