"""`kvferry bench kernels --tune`: launch choices tried on this GPU, the winners as rows for launch.toml."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from triton import TritonError

from kvferry.bench.gpu.cases import Case, differs, make_case
from kvferry.bench.gpu.choice import TUNABLE, Tunable, Values, gain, steps, winner
from kvferry.bench.gpu.session import Session
from kvferry.bench.gpu.work import Spec
from kvferry.kernels.gpu import launch
from kvferry.kernels.gpu.launch import Choice, Key

_PASSES = 2


def tune(specs: Sequence[Spec], session: Session, tunable: Mapping[str, Tunable] = TUNABLE) -> list[Choice]:
    """Rows that are faster than the table's, for this kind of device and the classes of shapes of these specs."""
    found: list[Choice] = []
    for op, how in tunable.items():
        cases = [make_case(spec, session.device, session.dtype) for spec in specs if spec.op in how.ops]
        for key, own in sorted(_by_key(op, cases).items()):
            before = replace(launch.choose(key[0], session.device, key[2]), device=key[1], shape=key[2])
            after = _tuned(before, own, how.grid, found, session)
            session.say(f"{' '.join(key)}: {in_words(before)} -> {in_words(after) if after else 'stays'}")
            if after:
                found = launch.merged(found, [after])
        del cases
        torch.cuda.empty_cache()
    return found


def rewrite(path: Path, rows: Sequence[Choice]) -> None:
    """Put the rows into a table's file, in the place of those that they replace."""
    launch.write(path, launch.merged(launch.read(path), rows))


def _by_key(op: str, cases: Sequence[Case]) -> dict[Key, list[Case]]:
    """To each row of an operation that is asked for the cases that ask."""
    found: dict[Key, list[Case]] = {}
    for case in cases:
        with launch.trial() as asked:
            case.make()()
        for key in asked:
            if key[0] == op:
                found.setdefault(key, []).append(case)
    return found


def _tuned(
    before: Choice,
    cases: Sequence[Case],
    grid: Mapping[str, Sequence[int]],
    others: Sequence[Choice],
    session: Session,
) -> Choice | None:
    """The row that won against the one before, or `None`."""
    with launch.trial(others):
        expected = [case.make()().clone() for case in cases]
    tried: dict[Values, list[float]] = {}

    def seconds(values: Values) -> None:
        if values not in tried:
            with launch.trial([*others, _choice(before, values)]):
                times = _seconds(cases, expected, session)
            if times is not None:
                tried[values] = times

    start = best = _values(before)
    seconds(start)
    if start not in tried:
        return None  # what the table says does not run here, so nothing says what is right
    for _ in range(_PASSES):
        round_best = best
        for values in steps(best, grid):
            seconds(values)
        best = winner(best, tried)
        if best == round_best:
            break
    if best == start:
        return None
    shapes = ", ".join(f"{case.spec.shape}: {1e3 * s:.4f} ms" for case, s in zip(cases, tried[best], strict=True))
    about = session.about
    why = (
        f"measured on {about.gpu}, torch {about.torch}, triton {about.triton}, {about.commit}: "
        f"{gain(tried[start], tried[best]):.2f} times as fast as {in_words(before)}; {shapes}"
    )
    return replace(_choice(before, best), why=why)


def _seconds(cases: Sequence[Case], expected: Sequence[torch.Tensor], session: Session) -> list[float] | None:
    """Medians of all cases; `None`: it does not fit this device, or computes something else."""
    found: list[float] = []
    for case, right in zip(cases, expected, strict=True):
        try:
            action: Callable[[], torch.Tensor] = case.make()
            if differs(action(), right) is not None:
                return None
            found.append(session.timer(action).median)
        except (TritonError, RuntimeError):  # too many registers or too much shared memory, mostly
            return None
    return found


def in_words(choice: Choice) -> str:
    """Block sizes, warps and stages of a row."""
    return " ".join(f"{name}={value}" for name, value in _values(choice))


def _values(choice: Choice) -> Values:
    return (*choice.sizes.items(), ("warps", choice.warps), ("stages", choice.stages))


def _choice(like: Choice, values: Values) -> Choice:
    sizes = dict(values)
    return replace(like, warps=sizes.pop("warps"), stages=sizes.pop("stages"), sizes=sizes)
