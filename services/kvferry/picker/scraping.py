"""Scrapes the metrics of all endpoints at an interval, each scrape bounded in time and bytes."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp
from blake3 import blake3

from kvferry.core.clock import Clock
from kvferry.picker.config import ScrapeConfig
from kvferry.picker.decide.endpoints import EndpointStates, PoolEndpoint, Trust
from kvferry.picker.decide.engine_metrics import MAX_PAGE_BYTES, read_page
from kvferry.picker.picker_metrics import PickerMetrics

_log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 2.0
_FAILED_INTERVALS = 5
"""Number of intervals until the next scrape of an endpoint that failed."""
_PART_BYTES = 1 << 16


class PageTooLarge(Exception):
    """A page has more than `MAX_PAGE_BYTES` bytes."""


class MetricsScraper:
    """Scrapes the endpoints of one pool. `run` is a background task, which owns the connections."""

    def __init__(
        self,
        config: ScrapeConfig,
        states: EndpointStates,
        clock: Clock,
        metrics: PickerMetrics,
        on_page: Callable[[], None],
    ) -> None:
        """
        Args:
            config: settings.
            states: the endpoints.
            clock: clock of the loads.
            metrics: metrics of the scrapes.
            on_page: called after each page.
        """
        self._config = config
        self._states = states
        self._clock = clock
        self._metrics = metrics
        self._on_page = on_page
        self._failed: set[str] = set()
        self._busy: set[str] = set()
        """Endpoints whose scrape is running: one that hangs holds up no other."""
        self._next: dict[str, float] = {}
        """Time before which an endpoint is not scraped again, after a failure."""
        self._tried: set[str] = set()
        self.num_rounds = 0
        """Number of rounds in which each endpoint had been scraped at least once, or had failed."""

    async def run(self) -> None:
        """Scrape until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=1, ttl_dns_cache=60)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        # Pages come from pods: neither cookies nor redirects nor proxies of the environment apply.
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                began = self._clock.monotonic()
                listed = [state.listed for state in self._states.by_address.values()]
                interval = self._config.interval(len(listed))
                await self._round(session, tasks, listed, interval)
                self._count()
                await asyncio.sleep(max(interval / 10, interval - (self._clock.monotonic() - began)))

    async def _round(
        self,
        session: aiohttp.ClientSession,
        tasks: asyncio.TaskGroup,
        listed: list[PoolEndpoint],
        interval: float,
    ) -> None:
        """Begin to scrape each endpoint, spread over the interval, so that the event loop is not held up at once."""
        batch = max(1, len(listed) // 20)
        for start in range(0, len(listed), batch):
            now = self._clock.monotonic()
            for endpoint in listed[start : start + batch]:
                if endpoint.address not in self._busy and self._next.get(endpoint.address, now) <= now:
                    self._busy.add(endpoint.address)
                    tasks.create_task(self._scrape(session, endpoint))
            if start + batch < len(listed):
                await asyncio.sleep(interval / 25)

    async def _scrape(self, session: aiohttp.ClientSession, endpoint: PoolEndpoint) -> None:
        began = self._clock.monotonic()
        try:
            page = await self._page(session, f"http://{endpoint.metrics_address}{self._config.path}")
            self._read(endpoint, page, began)
        except (aiohttp.ClientError, TimeoutError, OSError, PageTooLarge, ValueError) as error:
            self._fail(endpoint, f"{type(error).__name__}: {error}"[:200])
        except Exception:  # a bug must not stop the scrapes of the others
            _log.exception("reading the metrics of %s failed unexpectedly", endpoint.metrics_address)
            self._fail(endpoint, "unexpected error; the log has the details")
        finally:
            self._busy.discard(endpoint.address)
            self._tried.add(endpoint.address)

    def _read(self, endpoint: PoolEndpoint, page: bytes, began: float) -> None:
        load = read_page(page, self._config.flavor)
        self._metrics.scraped("unknown" if load is None else "ok")
        self._states.scraped(endpoint.address, load, blake3(page).digest(16), began)
        self._next.pop(endpoint.address, None)
        if load is None:
            self._log_once(endpoint, "the page has no metrics of a known model server; set --flavor or --metrics-port")
        elif endpoint.address in self._failed:
            self._failed.discard(endpoint.address)
            _log.info("the metrics of %s (%s) are read again", endpoint.name, endpoint.metrics_address)
        self._on_page()

    async def _page(self, session: aiohttp.ClientSession, url: str) -> bytes:
        """Return a page.

        Raises:
            PageTooLarge: it has more than `MAX_PAGE_BYTES` bytes.
            aiohttp.ClientError: it cannot be read.
        """
        async with session.get(url, allow_redirects=False, headers={"accept-encoding": "identity"}) as answer:
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(f"status {answer.status}")
            parts: list[bytes] = []
            size = 0
            async for part in answer.content.iter_chunked(_PART_BYTES):
                parts.append(part)
                size += len(part)
                if size > MAX_PAGE_BYTES:
                    raise PageTooLarge(f"the page has more than {MAX_PAGE_BYTES} bytes")
            return b"".join(parts)

    def _fail(self, endpoint: PoolEndpoint, why: str) -> None:
        self._metrics.scraped("failed")
        interval = self._config.interval(len(self._states.by_address))
        self._next[endpoint.address] = self._clock.monotonic() + min(_FAILED_INTERVALS * interval, _TIMEOUT_SECONDS)
        self._states.failed(endpoint.address, why)
        self._log_once(endpoint, why)

    def _log_once(self, endpoint: PoolEndpoint, why: str) -> None:
        if endpoint.address not in self._failed:
            self._failed.add(endpoint.address)
            _log.warning("the metrics of %s (%s) cannot be read: %s", endpoint.name, endpoint.metrics_address, why)

    def _count(self) -> None:
        by_trust: dict[Trust, int] = {}
        for state in self._states.by_address.values():
            trust = self._states.trust(state)
            by_trust[trust] = by_trust.get(trust, 0) + 1
        known = self._states.by_address.keys()
        self._failed &= known
        self._tried &= known
        self._next = {address: at for address, at in self._next.items() if address in known}
        self.num_rounds += self._tried >= known
        self._metrics.pool(by_trust, self._states.num_open)
