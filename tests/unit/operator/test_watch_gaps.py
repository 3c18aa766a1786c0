"""Deletions in a gap of a watch, with kopf itself against an API server over HTTP."""

import asyncio
import logging
from typing import Any

import kopf
import pytest
from unit.operator.pools import body
from unit.operator.watch_server import watch_server

from kvferry.core.clock import ManualClock
from kvferry.operator.api import ApiRefusal
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.process import census, watches
from kvferry.operator.process.watch_probe import WatchProbe

SECONDS = 8.0


def a_service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "team", "name": name, "uid": name, "labels": {names.LABEL_POOL: "chat"}},
        "spec": {},
    }


@pytest.mark.parametrize("left", [1, 0])
async def test_objects_that_were_deleted_in_a_gap_are_dropped_at_once(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "_FIRST_SECONDS", 600.0)
    monkeypatch.setattr(census, "_GATHER_SECONDS", 0.0)
    store, dropped = Store(), asyncio.Event()

    def enqueue(key: Key) -> None:
        assert key == Key("team", "chat")
        dropped.set()

    async with watch_server() as server:
        server.objects["Service"] = [a_service("stays"), a_service("goes")]
        api: Any = server
        saw = store_saw(store)
        counted = census.Census(api, store, (), saw, enqueue, frozenset)
        has_gap = asyncio.Event()

        def listed() -> None:
            if has_gap.is_set():  # The lists at the start begin a census, too.
                counted.request()

        await counted.first()
        assert store.names("Service") == {("team", "stays"), ("team", "goes")}
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=watches.registry(saw, listed, api),
            settings=watches.settings(4),
            standalone=True,
            clusterwide=True,
        )
        jobs = [asyncio.create_task(kopf.run_tasks(tasks, ignored=others)), asyncio.create_task(counted.run())]
        try:
            await asyncio.wait_for(server.wait_for_watches(len(watches.WATCHED)), SECONDS)
            del server.objects["Service"][left:]
            assert not dropped.is_set()
            has_gap.set()
            await server.end_watches()
            await asyncio.wait_for(dropped.wait(), SECONDS)
        finally:
            for job in [*jobs, *tasks]:
                job.cancel()
            await asyncio.wait([*jobs, *tasks], timeout=SECONDS)
            logging.getLogger("kopf").setLevel(logging.NOTSET)
    assert store.names("Service") == {("team", name) for name in ("stays", "goes")[:left]}


async def test_a_probe_of_an_object_that_does_not_exist_begins_a_census() -> None:
    store, missed = Store(), asyncio.Event()
    store.take(names.POOL_KIND, body(), gone=False)
    api: Any = GoneApi()
    probe = WatchProbe(api, store, ManualClock(), 10.0, missing=missed.set)
    running = asyncio.create_task(probe.run())
    await asyncio.wait_for(missed.wait(), SECONDS)
    running.cancel()
    assert probe.late() == {}


class GoneApi:
    def patch(self, *_: object, **__: object) -> None:
        raise ApiRefusal(404, "NotFound", "there is no such object")


def store_saw(store: Store) -> watches.Saw:
    def saw(kind: str, body: Any, gone: bool) -> None:
        store.take(kind, body, gone=gone)

    return saw
