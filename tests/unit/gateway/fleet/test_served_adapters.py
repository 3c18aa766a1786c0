"""Adapters that requests may name: those of the workers, and of the last ones while there are none."""

from typing import cast

from kvferry.core.ids import AdapterId, WorkerId
from kvferry.gateway.decide.routing.routes import Candidates, Replica
from kvferry.gateway.fleet.adapter_changes import AdapterChanges
from kvferry.gateway.fleet.fleet import Fleet

FIRST, SECOND = AdapterId("a", b"1" * 32), AdapterId("b", b"2" * 32)


class Workers:
    """A fleet of the given workers."""

    def __init__(self) -> None:
        self.both: tuple[Replica, ...] = ()

    def candidates(self) -> Candidates:
        return Candidates((), (), self.both)


def replica(*adapters: AdapterId) -> Replica:
    return Replica("w:1", WorkerId("w"), b"f", 0, adapters=frozenset(adapters))


def test_adapters_stay_known_while_no_worker_can_generate() -> None:
    workers = Workers()
    changes = AdapterChanges(cast(Fleet, workers))
    assert changes.served() == ()
    workers.both = (replica(FIRST, SECOND),)
    assert changes.served() == (FIRST, SECOND)
    workers.both = ()
    assert changes.served() == (FIRST, SECOND)
    workers.both = (replica(SECOND),)
    assert changes.served() == (SECOND,)
