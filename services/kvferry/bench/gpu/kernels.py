"""`kvferry bench kernels` on a GPU: operations of the Triton backend by shape, compared with other libraries.

If another library computes different results or cannot run, its row is omitted and the reason is reported.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvferry.bench.formulas.gpu_work import GpuRow, GpuTiming, Spec, row, work_of
from kvferry.bench.formulas.launch_choice import TUNABLE
from kvferry.bench.gpu import tuner
from kvferry.bench.gpu.cases import Case, differs, make_case
from kvferry.bench.gpu.session import Session
from kvferry.bench.gpu.tuner import in_words
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
) -> list[GpuRow]:
    """Measure operations and return their rows.

    Args:
        session: the device and its rates.
        ops: names of operations; empty selects all.
        show: called with every row as text.
        tune: whether to try launch choices first, write the fastest into the table and measure with them.
        csv_file: file to which each row is appended, so that an interrupted run keeps its rows.
        table: file of launch choices.

    Raises:
        UsageError: an operation is unknown, or the table cannot be written.
    """
    known = list(dict.fromkeys(spec.op for spec in session.specs))
    if missing := [op for op in ops if op not in known]:
        raise UsageError(f"unknown operation {missing[0]!r}; expected one of {', '.join(known)}", field="op")
    specs = [spec for spec in session.specs if not ops or spec.op in ops]
    if tune and not os.access(table, os.W_OK):  # check before the trials, which take minutes
        raise UsageError(f"--tune writes {table.name}, which is read-only here; run it in a checkout", field="tune")
    winners: list[Choice] = []
    if tune:
        winners = tuner.tune(specs, session)
        tuner.rewrite(table, winners)
        session.say(f"{len(winners)} rows of {table.name} are new")
    found: list[GpuRow] = []
    with launch.trial(winners):  # the table in memory was read before `rewrite`
        for each in measure(specs, session):
            show(line(each))
            if csv_file is not None:
                append_csv(csv_file, [asdict(each)])
            found.append(each)
    return found


def measure(specs: Sequence[Spec], session: Session) -> Iterator[GpuRow]:
    """Measure each spec with kvferry's kernels and all comparable installed libraries; yield the rows."""
    about, device, dtype = session.about, session.device, session.dtype
    name = str(dtype).removeprefix("torch.")
    for spec in specs:
        case, work = make_case(spec, device, dtype), work_of(spec, dtype.itemsize)
        with launch.trial() as launches:
            action = case.make()
            expected = action().clone()
        by = "; ".join(
            f"{op}: {in_words(launch.choose(op, device, shape))}"
            for op, _, shape in sorted(launches)
            if spec.op in TUNABLE[op].ops  # a plan also looks up choices that it does not use
        )
        yield row(about, spec, work, session.timer(action), session.rates, dtype=name, kernels=OURS, launch=by)
        for peer in case.peers:
            timing = _peer(case, peer, expected, session)
            if timing is not None:
                yield row(about, spec, work, timing, session.rates, dtype=name, kernels=peer, launch="")
        del case, action, expected
        torch.cuda.empty_cache()  # frees memory for the next case; no effect without a GPU


def _peer(case: Case, name: str, expected: torch.Tensor, session: Session) -> GpuTiming | None:
    try:
        action = case.peers[name]()
        wrong = differs(action(), expected) if case.is_comparable else None
        if wrong is None:
            return session.timer(action)
    except ImportError:  # not installed
        return None
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # raised by other libraries
        wrong, *_ = str(error).splitlines() or [type(error).__name__]
    session.say(f"{case.spec.op} {case.spec.shape}: {name} left out: {wrong}")
    return None


def line(found: GpuRow) -> str:
    """Format a row as one line of text."""
    return (
        f"{found.op:<18} {found.shape:<66} {found.kernels:<17} {found.ms:9.4f} ms  {found.gbps:7.0f} GB/s "
        f"{found.tflops:7.1f} TFLOP/s  {100 * found.share_of_bound:5.1f} % of the bound"
    )
