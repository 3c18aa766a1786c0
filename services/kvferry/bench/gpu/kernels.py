"""`kvferry bench kernels` on a GPU: every operation of the Triton family in each shape that matters, beside others.

Where a peer's result is not ours, or it cannot run, its row is left out and why is said: a time of something else is no
comparison.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvferry.bench.gpu import tuner
from kvferry.bench.gpu.cases import Case, differs, make_case
from kvferry.bench.gpu.choice import TUNABLE
from kvferry.bench.gpu.session import Session
from kvferry.bench.gpu.tuner import in_words
from kvferry.bench.gpu.work import Row, Spec, Timing, row, work_of
from kvferry.bench.rows import append_csv
from kvferry.core.errors import UsageError
from kvferry.kernels.gpu import launch
from kvferry.kernels.gpu.launch import TABLE, Choice

OURS = "triton"


@torch.inference_mode()
def run(
    session: Session,
    ops: Sequence[str],
    show: Callable[[str], None],
    *,
    tune: bool = False,
    csv_file: Path | None = None,
    table: Path = TABLE,
) -> list[Row]:
    """Measure operations.

    Args:
        session: where.
        ops: their names; all if empty.
        show: told of every row.
        tune: try launch choices first, write the winners into the table and measure with them.
        csv_file: where to append rows as they come, so that a run that is cut short leaves what it has.
        table: of launch choices.

    Raises:
        UsageError: there is no such operation, or the table cannot be written.
    """
    known = list(dict.fromkeys(spec.op for spec in session.specs))
    if missing := [op for op in ops if op not in known]:
        raise UsageError(f"no operation {missing[0]!r}; known: {', '.join(known)}", field="op")
    specs = [spec for spec in session.specs if not ops or spec.op in ops]
    if tune and not os.access(table, os.W_OK):  # before minutes of trials, not after them
        raise UsageError(f"--tune writes {table.name}, which is read-only here; run it in a checkout", field="tune")
    winners: list[Choice] = []
    if tune:
        winners = tuner.tune(specs, session)
        tuner.rewrite(table, winners)
        session.say(f"{len(winners)} rows of {table.name} are new")
    found: list[Row] = []
    with launch.trial(winners):  # the table was read before it was written
        for each in measure(specs, session):
            show(line(each))
            if csv_file is not None:
                append_csv(csv_file, [asdict(each)])
            found.append(each)
    return found


def measure(specs: Sequence[Spec], session: Session) -> Iterator[Row]:
    """A row for each spec and for each of its peers that is installed and computes the same."""
    about, device, dtype = session.about, session.device, session.dtype
    name = str(dtype).removeprefix("torch.")
    for spec in specs:
        case, work = make_case(spec, device, dtype), work_of(spec, dtype.itemsize)
        with launch.trial() as asked:
            action = case.make()
            expected = action().clone()
        by = "; ".join(
            f"{op}: {in_words(launch.choose(op, device, shape))}"
            for op, _, shape in sorted(asked)
            if spec.op in TUNABLE[op].ops  # a plan also asks for what it then has no use for
        )
        yield row(about, spec, work, session.timer(action), session.rates, dtype=name, kernels=OURS, launch=by)
        for peer in case.peers:
            timing = _peer(case, peer, expected, session)
            if timing is not None:
                yield row(about, spec, work, timing, session.rates, dtype=name, kernels=peer, launch="")
        del case, action, expected
        torch.cuda.empty_cache()  # the next one may need the room; without a GPU this does nothing


def _peer(case: Case, name: str, expected: torch.Tensor, session: Session) -> Timing | None:
    try:
        action = case.peers[name]()
        wrong = differs(action(), expected) if case.is_comparable else None
        if wrong is None:
            return session.timer(action)
    except ImportError:  # not installed: nothing to say
        return None
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # whatever others raise
        wrong, *_ = str(error).splitlines() or [type(error).__name__]
    session.say(f"{case.spec.op} {case.spec.shape}: {name} left out: {wrong}")
    return None


def line(found: Row) -> str:
    """A row for a reader."""
    return (
        f"{found.op:<18} {found.shape:<66} {found.kernels:<17} {found.ms:9.4f} ms  {found.gbps:7.0f} GB/s "
        f"{found.tflops:7.1f} TFLOP/s  {100 * found.share_of_bound:5.1f} % of the bound"
    )
