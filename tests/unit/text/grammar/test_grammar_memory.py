"""Memory of compiled grammars: the cache has bounds in bytes, and visited states are dropped without failures."""

import json
import random

import numpy as np
import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.process.memory import allocated_bytes
from kvferry.model import tiny
from kvferry.text.grammar import compiler as module
from kvferry.text.grammar import grammar
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.grammar import Grammar, GrammarState
from kvferry.text.grammar.large_stack import call_with_stack

TOKENIZER = tiny.tokenizer(tiny.config())
MIB = 1 << 20
WORDS = Constraint(ConstraintKind.REGEX, "(a|b)*a(a|b){10}c")
"""Its automaton has a state for each text of ten letters."""


def of_cost(name: str, cost_bytes: int) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, json.dumps([name]), cost_bytes=cost_bytes)


def with_states(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Limit the number of states that the outputs of a grammar may visit."""
    monkeypatch.setattr(module, "MAX_STATES", number)


def draw(state: GrammarState, seed: int, count: int = 80) -> list[int]:
    """Draw tokens; return them."""
    rng, drawn = random.Random(seed), []
    for _ in range(count):
        token = rng.choice(np.flatnonzero(state.allowed()).tolist())
        if token in TOKENIZER.eos_token_ids:
            break
        state.advance([token])
        drawn.append(token)
    return drawn


def test_a_check_measures_native_memory() -> None:
    if not allocated_bytes():
        pytest.skip("the C library does not report allocations")
    compiler = GrammarCompiler(TOKENIZER)
    compiler.check(WORDS)
    source = '{"type": "integer", "multipleOf": %d}'
    sizes = [compiler.check(Constraint(ConstraintKind.JSON_SCHEMA, source % number)) for number in (7, 499, 4999)]
    assert sizes == sorted(sizes)
    assert sizes[2] > MIB
    with pytest.raises(InvalidRequest, match="MiB of memory") as caught:
        compiler.check(Constraint(ConstraintKind.JSON_SCHEMA, source % 99_991))
    assert caught.value.reason == "CONSTRAINT_TOO_COSTLY"
    assert compiler.cached_bytes == 0


def test_the_cache_is_bounded_by_the_measured_memory() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    made = [compiler.compile(of_cost(name, 30 * MIB)) for name in "abc"]
    assert compiler.cached_bytes == 60 * MIB
    assert compiler.compile(of_cost("c", 30 * MIB)) is made[2]
    assert compiler.compile(of_cost("a", 30 * MIB)) is not made[0], "the least recently used one was evicted"
    small = [compiler.compile(of_cost(f"s{number}", 10)) for number in range(40)]
    assert [compiler.compile(of_cost(f"s{number}", 10)) for number in range(40)] == small


def test_the_memory_is_no_part_of_the_identity() -> None:
    assert of_cost("a", 1) == of_cost("a", 2)
    assert hash(of_cost("a", 1)) == hash(of_cost("a", 2))
    assert repr(of_cost("a", 1)) == repr(of_cost("a", 2))


def test_the_cache_is_emptied_when_native_memory_has_grown() -> None:
    clock, allocated = ManualClock(), [0]
    compiler = GrammarCompiler(TOKENIZER, clock, lambda: allocated[0])

    def again() -> bool:
        clock.advance(1.0)
        return compiler.compile(WORDS) is first

    first = compiler.compile(WORDS)
    allocated[0] = module.MAX_GROWTH_BYTES
    assert again()
    allocated[0] += 1
    assert compiler.compile(WORDS) is first, "memory is measured once a second"
    assert not again()
    first = compiler.compile(WORDS)
    allocated[0] += module.MAX_GROWTH_BYTES
    assert again(), "other memory remained: growth is measured from there"
    allocated[0] = 0
    assert again()
    allocated[0] = module.MAX_GROWTH_BYTES + 1
    assert not again()


def test_outputs_of_a_popular_grammar_do_not_run_out_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    with_states(monkeypatch, 80)
    popular = GrammarCompiler(TOKENIZER).compile(WORDS)
    texts = {bytes(draw(popular.start(), seed)) for seed in range(40)}
    assert all(text.endswith(b"c") for text in texts)
    assert len(texts) > 30


def test_an_output_that_begins_again_goes_on_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [draw(GrammarCompiler(TOKENIZER).compile(WORDS).start(), seed) for seed in range(10)]
    with_states(monkeypatch, 80)
    shared = GrammarCompiler(TOKENIZER).compile(WORDS)
    assert [draw(shared.start(), seed) for seed in range(10)] == expected
    state = shared.start()
    drawn = draw(state, 3, count=20)
    copied = state.copy()
    for seed in range(20):
        draw(shared.start(), seed)  # uses up the shared states
    assert drawn + draw(copied, 5) == drawn + draw(state, 5)


def test_an_output_that_needs_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_states(monkeypatch, 30)
    compiled: list[int] = []
    make = Grammar.renewed
    monkeypatch.setattr(Grammar, "renewed", lambda *given: compiled.append(1) or make(*given))
    with pytest.raises(InvalidRequest) as caught:
        draw(GrammarCompiler(TOKENIZER).compile(WORDS).start(), 0)
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
    assert len(compiled) <= grammar.MAX_RENEWALS


def test_a_chain_of_references_does_not_need_the_stack_of_the_caller() -> None:
    """300 definitions take more than the 256 KiB of the thread here; a constraint has room for a few thousand."""
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(300)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a300": {"const": 7}}}
    of = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    compiler = GrammarCompiler(TOKENIZER)
    state = call_with_stack(256 << 10, lambda: compiler.compile(of).start())
    assert bytes(draw(state, 0)) == b"7"
