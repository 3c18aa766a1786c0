"""`kvferry bench kernels --tune`: measures launch choices on this GPU and writes the fastest to launch.toml."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from triton import TritonError

from kvferry.bench.formulas.gpu_work import Spec
from kvferry.bench.formulas.launch_choice import TUNABLE, Tunable, Values, gain, steps, winner
from kvferry.bench.gpu.cases import Case, differs, make_case
from kvferry.bench.gpu.session import Session
from kvferry.kernels.gpu import launch
from kvferry.kernels.gpu.launch import Choice, Key

_PASSES = 2


def tune(specs: Sequence[Spec], session: Session, tunable: Mapping[str, Tunable] = TUNABLE) -> list[Choice]:
    """Find faster rows of the launch table for this type of device and the shape classes of these specs."""
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
    """Write rows to the file of a launch table; they replace rows with the same keys."""
    launch.write(path, launch.merged(launch.read(path), rows))


def _by_key(op: str, cases: Sequence[Case]) -> dict[Key, list[Case]]:
    """Group cases by the row that they use in the table of kernel launch parameters."""
    found: dict[Key, list[Case]] = {}
    for case in cases:
        with launch.trial() as launches:
            case.make()()
        for key in launches:
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
    """Return a row that is faster than the current row; `None` if no such row was found."""
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
        return None  # the current row does not run on this device: no reference result
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
    """Return the median duration of each case in seconds; `None` if the choice fails on this device or its result is
    wrong."""
    found: list[float] = []
    for case, right in zip(cases, expected, strict=True):
        try:
            action: Callable[[], torch.Tensor] = case.make()
            if differs(action(), right) is not None:
                return None
            found.append(session.timer(action).median)
        except (TritonError, RuntimeError):  # usually too many registers or too much shared memory
            return None
    return found


def in_words(choice: Choice) -> str:
    """Format the block sizes, warps and stages of a row as text."""
    return " ".join(f"{name}={value}" for name, value in _values(choice))


def _values(choice: Choice) -> Values:
    return (*choice.sizes.items(), ("warps", choice.warps), ("stages", choice.stages))


def _choice(like: Choice, values: Values) -> Choice:
    sizes = dict(values)
    return replace(like, warps=sizes.pop("warps"), stages=sizes.pop("stages"), sizes=sizes)
