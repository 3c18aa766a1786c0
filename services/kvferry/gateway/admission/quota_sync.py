"""Reports what a gateway uses of its tenants' quotas to the server that the gateways of a pool share.

One call at a time, for many tenants, at intervals; at once if a request waits for budget that the gateway has not
leased. The other requests do not wait: neither those of tenants whose budget suffices, nor those that the last answer
lets refuse.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple

from kvferry.core.clock import Clock
from kvferry.core.rare_lines import RareLines, more
from kvferry.gateway.admission.lease_script import LEASE_SCRIPT
from kvferry.gateway.decide.flow.leased_budget import INTERVAL_SECONDS, LEASE_SECONDS
from kvferry.gateway.decide.flow.shared_quotas import LeaseAnswer, LeaseReport, SharedQuotas
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient, StoreUnavailable

_log = logging.getLogger(__name__)
_CALL_SECONDS = 1.0
"""Time limit of a call; a request waits for the one under way, and for the next one."""
_IDLE_SECONDS = 1.0
"""Interval of calls without reports, by which the gateways are counted."""
_RETRY_SECONDS = 1.0
"""Time between a failed call and the next one."""
_MAX_TENANTS_PER_CALL = 128
_MARGIN_SECONDS = 1.0
"""Time for which the server keeps a lease after the gateway has stopped using it."""


class QuotaSync:
    """Keeps the quotas of one gateway equal to those of its pool. Used on the event loop's thread only."""

    def __init__(
        self, client: StateClient, seal: PoolSeal, gateway: str, clock: Clock, instruments: GatewayInstruments
    ) -> None:
        """
        Args:
            client: calls the server.
            seal: derives the names of tenants.
            gateway: a name that no other gateway has, and no earlier process of this one.
            clock: monotonic time.
            instruments: metrics.
        """
        self.quotas = SharedQuotas()
        self._script = client.script("quotas", LEASE_SCRIPT)
        self._seal, self._gateway, self._clock, self._instruments = seal, gateway.encode(), clock, instruments
        self._lines = RareLines(clock)
        self._wanted, self._answered = asyncio.Event(), asyncio.Event()
        self._called_at = 0.0

    async def ensure(self, tenant: str, policy: TenantPolicy, tokens: float) -> None:
        """Wait until this gateway has budget for a request of a tenant, if the pool may have some.

        Args:
            tenant: the tenant.
            policy: the tenant's quotas.
            tokens: expected number of tokens of the request.
        """
        now = self._clock.monotonic()
        if not self.quotas.lacks(tenant, policy, tokens, now):
            return
        answered = self._answered
        self._wanted.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * _CALL_SECONDS):  # a call may be under way
                await answered.wait()
        self._instruments.quota_wait_seconds.observe(self._clock.monotonic() - now)

    async def run(self) -> None:
        """Report until cancelled."""
        pause = INTERVAL_SECONDS
        while True:
            with suppress(TimeoutError):
                # Otherwise the gateways would always report in the same order, and the last one would get the least.
                async with asyncio.timeout(pause * random.uniform(0.8, 1.0)):  # noqa: S311
                    await self._wanted.wait()
            pause = await self.report()

    async def report(self, *, leaves: bool = False) -> float:
        """Send the reports that are due; return the time until the next ones in seconds.

        Args:
            leaves: whether this gateway ends, and gives everything back.
        """
        self._wanted.clear()
        answered, self._answered = self._answered, asyncio.Event()
        now = self._clock.monotonic()
        reports = self.quotas.reports(now, leaves=leaves)
        try:
            if not reports and not leaves and now - self._called_at < _IDLE_SECONDS and not self.quotas.is_failing:
                return INTERVAL_SECONDS
            for first in range(0, max(1, len(reports)), _MAX_TENANTS_PER_CALL):
                await self._call(reports[first : first + _MAX_TENANTS_PER_CALL], leaves=leaves)
        except (StoreUnavailable, ValueError) as error:
            self._failed(error)
            waiting, self._answered = self._answered, asyncio.Event()
            waiting.set()  # those that would wait for the next call
            return _RETRY_SECONDS
        finally:
            answered.set()
        return INTERVAL_SECONDS

    async def leave(self) -> None:
        """Give back what this gateway has leased."""
        await self.report(leaves=True)

    async def _call(self, reports: Sequence[LeaseReport], *, leaves: bool) -> None:
        """Send reports, and note the answers.

        Raises:
            StoreUnavailable: Redis did not answer in time, or with an error.
            ValueError: an answer has no sense.
        """
        self._called_at = now = self._clock.monotonic()
        number = self.quotas.sent(now)
        prefix = self._seal.prefix
        keys = [prefix + b"gateways", *(prefix + b"q:" + self._seal.tenant(report.tenant) for report in reports)]
        lease = round(1e3 * (LEASE_SECONDS + _MARGIN_SECONDS))
        arguments: list[bytes | int | float] = [b"", self._gateway, number, lease, int(leaves)]
        for each in reports:
            arguments.append(each.answered)
            arguments += [*astuple(each.requests), *astuple(each.tokens), *astuple(each.slots)]
        found = await self._script.run(keys, arguments, _CALL_SECONDS)
        answers = {
            report.tenant: LeaseAnswer.parse(text, report)
            for report, text in zip(reports, found[1:], strict=True)
            if text is not None
        }
        was_alone = self.quotas.is_failing
        self.quotas.answer(answers, int(found[0]), self._clock.monotonic())
        if was_alone:
            self._instruments.quotas_alone.set(0)
            _log.info("quotas are shared with %d gateways again", self.quotas.num_gateways)

    def _failed(self, error: Exception) -> None:
        self.quotas.failed()
        self._instruments.quotas_alone.set(1)
        if (left_out := self._lines.left_out("quotas")) is not None:
            why = error.message if isinstance(error, StoreUnavailable) else f"an answer has no sense: {error}"
            _log.warning(
                "quotas are not shared: %s; this gateway has 1/%d of each%s", why, self.quotas.num_gateways,
                more(left_out),
            )  # fmt: skip
