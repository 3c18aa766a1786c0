"""Runs a case: traffic before, during and after the fault, then a check that all resources are free."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from harness.faults.cases import Case
from harness.faults.traffic import CLOCK, Ended, Question, Traffic
from harness.faults.watch import Watch
from harness.idle import assert_workers_idle

SECONDS = 90.0
"""Time limit in seconds for events without a specific limit."""
_NUM_WARM = 12
_NUM_MEANWHILE = 10
_UNAVAILABLE = "UNAVAILABLE"

Felt = Callable[[], bool]
"""Function that returns whether the fault affected at least one request."""
Fault = Callable[[], AbstractContextManager[Felt]]
IsNormal = Callable[[Sequence[Ended]], bool]
"""Function that returns whether these requests, all started after the fault, used all components."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a case."""

    name: str
    num_right: int
    """Number of successful requests among those that were running at the fault or started before recovery."""
    num_failed: int
    longest_seconds: float
    normal_seconds: float
    """Seconds from the end of the fault until requests used all components."""
    idle_seconds: float
    """Seconds from the end of the last request until all workers were idle."""
    held: dict[str, int] = field(default_factory=dict)
    """Maximum number of resources in use until recovery, by kind."""
    note: str = ""


def workers_used(ended: Iterable[Ended]) -> set[str]:
    """Return the workers that took part in a successful KV fetch."""
    timings = [end.timing for end in ended if end.is_right and end.timing is not None]
    fetched = [timing for timing in timings if timing.handoff_outcome == "fetched"]
    return {name for timing in fetched for name in (timing.prefill_worker, timing.decode_worker)}


def tiers_used(ended: Iterable[Ended]) -> set[str]:
    """Return the tiers from which blocks were loaded."""
    timings = [end.timing for end in ended if end.is_right and end.timing is not None]
    return {report.source for timing in timings for report in timing.kv if report.blocks_loaded}


def undergo(
    case: Case,
    fault: Fault,
    *,
    gateway: str,
    admin: Iterable[str],
    question_list: Sequence[Question],
    is_normal: IsNormal,
) -> Row:
    """Run a case and return its results.

    Args:
        fault: context manager that starts the fault on entry and ends it on exit.
        gateway: `host:port` of the gateway's gRPC server.
        admin: `host:port` of every WorkerAdmin that is running at the end.

    Raises:
        AssertionError: a token was wrong, a request failed although this is not permitted or took too long, the service
            did not continue or recover, or a worker still has resources in use.
    """
    addresses = tuple(admin)
    with Traffic(gateway, question_list) as traffic:
        traffic.until(
            lambda all_: len(all_) >= _NUM_WARM and is_normal(all_), "normal operation before the fault", SECONDS
        )
        with Watch(addresses) as watch:
            struck = CLOCK.monotonic()
            with fault() as felt:
                traffic.until(lambda all_: _meanwhile(case, all_, struck), "requests succeed during the fault", SECONDS)
                traffic.until(lambda _: felt(), "the fault affects a request", SECONDS)
            over = CLOCK.monotonic() if case.seconds else struck
            traffic.until(lambda all_: is_normal(_since(all_, over)), "normal again", case.normal_within + SECONDS)
            normal = first_normal(is_normal, _since(traffic.ended[:], over))
        traffic.stop()
    stopped = CLOCK.monotonic()
    assert_workers_idle(addresses, within_seconds=SECONDS)
    idle = CLOCK.monotonic()
    met = [end for end in traffic.ended if end.ended >= struck and end.began <= normal]
    check(case, traffic.ended, met)
    assert normal - over <= case.normal_within, f"recovery took {normal - over:.1f} s, limit {case.normal_within:.0f} s"
    return Row(
        name=case.name,
        num_right=sum(end.is_right for end in met),
        num_failed=sum(bool(end.error) for end in met),
        longest_seconds=max(end.ended - end.began for end in met),
        normal_seconds=normal - over,
        idle_seconds=idle - stopped,
        held={kind: number for kind, number in watch.most.items() if number},
    )


def _since(ended: Sequence[Ended], moment: float) -> list[Ended]:
    return [end for end in ended if end.began >= moment]


def _meanwhile(case: Case, ended: Sequence[Ended], struck: float) -> bool:
    lasted = CLOCK.monotonic() - struck >= case.seconds
    right = sum(end.is_right for end in _since(ended, struck))
    return lasted and (not case.goes_on or right >= _NUM_MEANWHILE)


def first_normal(is_normal: IsNormal, since: Sequence[Ended]) -> float:
    """Return the end time of the first request at which `is_normal` holds."""
    return next(since[i].ended for i in range(len(since)) if is_normal(since[: i + 1]))


def check(case: Case, ended: Sequence[Ended], met: Sequence[Ended]) -> None:
    """Check that all requests ended as permitted by the case.

    Args:
        ended: results of all requests.
        met: results of the requests that the fault may have affected.

    Raises:
        AssertionError: a request ended in a way that is not permitted.
    """
    wrong = [end.wrong for end in ended if end.wrong]
    assert not wrong, f"{len(wrong)} requests had wrong tokens, the first: {wrong[0]}"
    errors = [end.error for end in ended if end.error]
    if case.may_fail:
        errors = [error for error in errors if error.partition(":")[0] != _UNAVAILABLE]
    assert not errors, f"{len(errors)} errors that are not permitted, the first: {errors[0]}"
    longest = max(end.ended - end.began for end in met)
    assert longest <= case.request_within, f"a request took {longest:.1f} s"
