"""Attributes of sequences are assigned only in the modules of their classes; other modules call methods."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.engine.schedule.step.kv_progress import KvProgress
from kvferry.engine.schedule.step.sampling_state import SamplingState
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest

SERVICES = Path(__file__).parents[2] / "services"
STEP = SERVICES / "kvferry/engine/schedule/step"
ATTRIBUTES = {
    attribute
    for one in (KvProgress, SamplingState, Sequence, SequenceRequest)
    for attribute in vars(one)["__slots__"]
}  # fmt: skip
USERS = sorted(
    path
    for path in (SERVICES / "kvferry").rglob("*.py")
    if path.parent != STEP and "step.sequence import" in path.read_text(encoding="utf-8")
)


def assigned(source: str) -> Iterator[str]:
    """Yield the attributes of a sequence that a module assigns or deletes, except those of `self`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or node.attr not in ATTRIBUTES:
            continue
        if ast.unparse(node.value) != "self":
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(SERVICES)))
def test_a_user_of_sequences_assigns_none_of_their_attributes(path: Path) -> None:
    known = {"run.tokens", "counts.tokens"}  # of the simulator's runs and counters
    found = [one for one in assigned(path.read_text(encoding="utf-8")) if one.split(": ")[1] not in known]
    assert found == [], "call a method of the attribute's owner"


def test_an_assignment_is_found() -> None:
    source = "sequence.kv.num_computed += 1\nself.kv = 0\nsequence.sampling.mask, other = None, 1\n"
    assert list(assigned(source)) == ["line 1: sequence.kv.num_computed", "line 3: sequence.sampling.mask"]
    assert len(USERS) > 10
