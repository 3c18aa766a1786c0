"""One case from its fault to its row: traffic before, during and after, and everything given back at the end."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvferry.testing.faults.cases import Case
from kvferry.testing.faults.traffic import CLOCK, Ended, Question, Traffic
from kvferry.testing.faults.watch import Watch
from kvferry.testing.idle import assert_workers_idle

SECONDS = 90.0
"""For what happens sooner or later."""
_NUM_WARM = 12
_NUM_MEANWHILE = 10
_UNAVAILABLE = "UNAVAILABLE"

Felt = Callable[[], bool]
"""Whether the fault has really been met by somebody."""
Fault = Callable[[], AbstractContextManager[Felt]]
IsNormal = Callable[[Sequence[Ended]], bool]
"""Whether these requests, all begun after the fault, show that everything is used again."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a case."""

    name: str
    num_right: int
    """Requests that were running when the fault began, or began before everything was normal."""
    num_failed: int
    longest_seconds: float
    normal_seconds: float
    """From the end of the fault until what was missing was used again."""
    idle_seconds: float
    """From the last request's end until no worker held anything."""
    held: dict[str, int] = field(default_factory=dict)
    """The most that was held at a time while the fault lasted, by kind."""
    note: str = ""


def workers_used(ended: Iterable[Ended]) -> set[str]:
    """Workers that took part in a hand-off by fetching."""
    timings = [end.timing for end in ended if end.is_right and end.timing is not None]
    fetched = [timing for timing in timings if timing.handoff_outcome == "fetched"]
    return {name for timing in fetched for name in (timing.prefill_worker, timing.decode_worker)}


def tiers_used(ended: Iterable[Ended]) -> set[str]:
    """Tiers that blocks were loaded from."""
    timings = [end.timing for end in ended if end.is_right and end.timing is not None]
    return {report.source for timing in timings for report in timing.kv if report.blocks_loaded}


def undergo(
    case: Case, fault: Fault, *, gateway: str, admin: Iterable[str], asked: Sequence[Question], is_normal: IsNormal
) -> Row:
    """Do it; the row.

    Args:
        fault: does it when entered and ends it when left.
        gateway: `host:port` of its gRPC side.
        admin: `host:port` of every WorkerAdmin that lives at the end.

    Raises:
        AssertionError: a token was wrong, a request failed that must not or took too long, the service did not go on,
            or a worker still holds something.
    """
    addresses = tuple(admin)
    with Traffic(gateway, asked) as traffic:
        traffic.until(lambda all_: len(all_) >= _NUM_WARM and is_normal(all_), "it is normal before", SECONDS)
        with Watch(addresses) as watch:
            struck = CLOCK.monotonic()
            with fault() as felt:
                traffic.until(lambda all_: _meanwhile(case, all_, struck), "it goes on meanwhile", SECONDS)
                traffic.until(lambda _: felt(), "the fault is met", SECONDS)
            over = CLOCK.monotonic() if case.seconds else struck
            traffic.until(lambda all_: is_normal(_since(all_, over)), "normal again", case.normal_within + SECONDS)
            normal = first_normal(is_normal, _since(traffic.ended[:], over))
        traffic.stop()
    stopped = CLOCK.monotonic()
    assert_workers_idle(addresses, within_seconds=SECONDS)
    idle = CLOCK.monotonic()
    met = [end for end in traffic.ended if end.ended >= struck and end.began <= normal]
    check(case, traffic.ended, met)
    assert normal - over <= case.normal_within, f"normal again after {normal - over:.1f} s"
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
    """When the request ended that made it normal."""
    return next(since[i].ended for i in range(len(since)) if is_normal(since[: i + 1]))


def check(case: Case, ended: Sequence[Ended], met: Sequence[Ended]) -> None:
    """Whether all requests ended as they may.

    Args:
        ended: all of them.
        met: those that the fault may have met.

    Raises:
        AssertionError: one did not.
    """
    wrong = [end.wrong for end in ended if end.wrong]
    assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"
    errors = [end.error for end in ended if end.error]
    if case.may_fail:
        errors = [error for error in errors if error.partition(":")[0] != _UNAVAILABLE]
    assert not errors, f"{len(errors)} errors that must not be, the first: {errors[0]}"
    longest = max(end.ended - end.began for end in met)
    assert longest <= case.request_within, f"a request took {longest:.1f} s"
