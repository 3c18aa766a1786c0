"""Held requests scale up the roles of a sleeping pool."""

import asyncio
from typing import Any

import pytest

from kvferry.core.clock import SystemClock
from kvferry.gateway.decide.config import HoldConfig, PoolName
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.fleet.pool_api import ApiError
from kvferry.gateway.fleet.waking import Waker

CLOCK = SystemClock()


class ScriptedApi:
    """An API with a scaler for each role. A scaler that is an exception is raised."""

    pool = PoolName("ns", "p")

    def __init__(self, **scalers: Any) -> None:
        self.scalers = scalers
        self.wakes: list[tuple[str, str]] = []
        self.wake_error: ApiError | None = None

    def scaler(self, role: str) -> Any:
        found = self.scalers.get(role)
        if isinstance(found, Exception):
            raise found
        return found

    def wake(self, role: str, version: str) -> None:
        self.wakes.append((role, version))
        if self.wake_error is not None:
            raise self.wake_error


def asleep(version: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version, "annotations": {"kvferry.dev/wake": "true"}},
        "spec": {"replicas": 0},
    }


async def test_waiting_wakes_each_role_that_may_be_woken_once():
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi(prefill=asleep("3"), decode=asleep("4"))
    waker = Waker(api, holding, CLOCK)  # type: ignore[arg-type]
    await waker.check()
    assert api.wakes == []
    with holding.held():
        await waker.check()
        await waker.check()
    assert api.wakes == [("prefill", "3"), ("decode", "4")]
    assert (waker.num_wakes, waker.failure) == (2, "")


async def test_an_error_is_logged_once_and_reported_until_it_ends(caplog):
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi(prefill=ApiError("refused with 403", 403), decode=asleep())
    waker = Waker(api, holding, CLOCK)  # type: ignore[arg-type]
    with holding.held():
        await waker.check()
        await waker.check()
        assert waker.failure == "refused with 403"
        assert api.wakes == [("decode", "1")], "a failure of one role does not affect the other"
        api.scalers["prefill"] = None
        await waker.check()
        assert waker.failure == ""
    assert len([record for record in caplog.records if "cannot be scaled up" in record.message]) == 1


@pytest.mark.parametrize(("status", "failure"), [(409, ""), (403, "no")])
async def test_a_concurrent_change_of_a_scaler_is_no_error(status, failure):
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi(decode=asleep())
    api.wake_error = ApiError("no", status)
    waker = Waker(api, holding, CLOCK)  # type: ignore[arg-type]
    with holding.held():
        await waker.check()
    assert (waker.failure, waker.num_wakes) == (failure, 0)


async def test_the_waker_checks_while_requests_wait():
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi()
    slept = asyncio.Semaphore(0)

    async def sleep(_seconds: float) -> None:
        slept.release()
        await asyncio.sleep(0)

    waker = Waker(api, holding, CLOCK, sleep=sleep)  # type: ignore[arg-type]
    running = asyncio.create_task(waker.run())
    with holding.held():
        waker.request()
        async with asyncio.timeout(10):
            await slept.acquire()
            api.scalers["decode"] = asleep()
            for _ in iter(lambda: bool(api.wakes), True):
                await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
