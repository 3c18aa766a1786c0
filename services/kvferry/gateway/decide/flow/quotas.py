"""Quotas of tenants: token buckets of requests and tokens, and concurrent requests.

A request is charged its expected tokens when it is accepted, and the charge is corrected to the tokens that it used
when it ends. The level of the bucket may therefore become negative; the tenant's requests are then refused until the
level is positive again.
"""

from dataclasses import dataclass, field

from kvferry.core.errors import Overloaded
from kvferry.gateway.decide.flow.capacity import MIN_RETRY_SECONDS
from kvferry.gateway.decide.flow.controller import QUEUE_FULL
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy

_SECONDS_PER_MINUTE = 60.0
MAX_WAIT_SECONDS = 3600.0
_FIRST_OUTPUT_TOKENS = 256.0
"""Expected output tokens per sample of a tenant's first requests, capped at their `max_tokens`."""
_NEW_SHARE = 0.1
"""Weight of the newest request in a tenant's averages."""


class QuotaExceeded(Overloaded):
    """A quota of the tenant is used up; `quota` is its field in the tenants file."""

    quota: str = ""


@dataclass(slots=True)
class Bucket:
    """A token bucket whose level is refilled continuously."""

    level: float
    updated: float
    """Monotonic seconds."""

    def refill(self, per_minute: float, capacity: float, now: float) -> None:
        """Refill for the time since the last call, up to `capacity`.

        Args:
            per_minute: units added per minute.
            capacity: maximum level.
            now: monotonic seconds.
        """
        elapsed = max(0.0, now - self.updated)
        self.level = min(capacity, self.level + elapsed * per_minute / _SECONDS_PER_MINUTE)
        self.updated = max(self.updated, now)

    def wait_seconds(self, cost: float, per_minute: float, capacity: float) -> float:
        """Return the time until `cost` can be taken, in seconds; 0 if it can be taken now. A cost above the capacity
        needs a full bucket.

        Args:
            cost: units to take.
            per_minute: units added per minute.
            capacity: maximum level.
        """
        missing = min(cost, capacity) - self.level
        return 0.0 if missing <= 0 else missing * _SECONDS_PER_MINUTE / per_minute


@dataclass(slots=True)
class Account:
    """Usage of one tenant."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    num_open: int = 0
    """Requests that are queued or running."""
    output_tokens: float = _FIRST_OUTPUT_TOKENS
    """Average output tokens of a sample."""
    seconds: float = MIN_RETRY_SECONDS
    """Average duration of a request, seconds."""


@dataclass(slots=True)
class Quotas:
    """The accounts of all tenants that have used the gateway; at most one per tenant."""

    accounts: dict[str, Account] = field(default_factory=dict)

    def account(self, tenant: str) -> Account:
        """Return the tenant's account; a new one if there is none."""
        found = self.accounts.get(tenant)
        if found is None:
            found = self.accounts[tenant] = Account()
        return found

    def expected_output(self, tenant: str, max_tokens: int) -> float:
        """Return the expected number of output tokens of a sample, at most `max_tokens`.

        Args:
            tenant: the tenant, whose average is used.
            max_tokens: the sample's limit.
        """
        return min(float(max_tokens), self.account(tenant).output_tokens)

    def check(self, tenant: str, policy: TenantPolicy, tokens: float, now: float) -> None:
        """Check that the quotas allow one more request.

        Args:
            tenant: the tenant.
            policy: the tenant's quotas.
            tokens: expected number of tokens of the request.
            now: monotonic time in seconds.

        Raises:
            QuotaExceeded: a quota is exhausted; the message names it and its value.
        """
        account = self.account(tenant)
        limit = policy.concurrent_requests
        if limit is not None and account.num_open >= limit:
            raise over_quota(tenant, "concurrent_requests", limit, account.seconds / limit)
        self.check_requests(tenant, policy, now)
        if policy.tokens_per_minute is not None:
            bucket = account.tokens = account.tokens or Bucket(policy.token_capacity, now)
            bucket.refill(policy.tokens_per_minute, policy.token_capacity, now)
            wait = bucket.wait_seconds(tokens, policy.tokens_per_minute, policy.token_capacity)
            if wait:
                raise over_quota(tenant, "tokens_per_minute", policy.tokens_per_minute, wait)

    def check_requests(self, tenant: str, policy: TenantPolicy, now: float) -> None:
        """Check that the quota of requests allows one more.

        Args:
            tenant: the tenant.
            policy: the tenant's quotas.
            now: monotonic seconds.

        Raises:
            QuotaExceeded: the quota of requests is exhausted.
        """
        wait = self._request_wait(self.account(tenant), policy, now)
        if wait:
            raise over_quota(tenant, "requests_per_minute", policy.requests_per_minute, wait)

    def _request_wait(self, account: Account, policy: TenantPolicy, now: float) -> float:
        if policy.requests_per_minute is None:
            account.requests = None
            return 0.0
        bucket = account.requests = account.requests or Bucket(policy.request_capacity, now)
        bucket.refill(policy.requests_per_minute, policy.request_capacity, now)
        return bucket.wait_seconds(1.0, policy.requests_per_minute, policy.request_capacity)

    def begin(self, tenant: str, tokens: float) -> None:
        """Charge an accepted request, which is open until `end`.

        Args:
            tenant: the tenant.
            tokens: expected number of tokens of the request.
        """
        account = self.account(tenant)
        account.num_open += 1
        self._charge(account, 1.0, tokens)

    def count(self, tenant: str, policy: TenantPolicy, now: float) -> None:
        """Check and charge a request that computes no tokens.

        Args:
            tenant: the tenant.
            policy: the tenant's quotas.
            now: monotonic seconds.

        Raises:
            QuotaExceeded: the quota of requests is exhausted.
        """
        self.check_requests(tenant, policy, now)
        self._charge(self.account(tenant), 1.0, 0.0)

    def end(self, tenant: str, expected: float, used: float) -> None:
        """Close a request, and correct its charge to the tokens that it used.

        Args:
            tenant: the tenant.
            expected: number of tokens charged by `begin`.
            used: number of tokens that the request used.
        """
        account = self.account(tenant)
        account.num_open -= 1
        self._charge(account, 0.0, used - expected)

    def learn(self, tenant: str, output_tokens: float, seconds: float) -> None:
        """Note the output tokens per sample and the duration of a request that ended without an error.

        Args:
            tenant: the tenant.
            output_tokens: average output tokens of the request's samples.
            seconds: duration of the request.
        """
        account = self.account(tenant)
        account.output_tokens += _NEW_SHARE * (output_tokens - account.output_tokens)
        account.seconds += _NEW_SHARE * (seconds - account.seconds)

    def forget_all_but(self, known: frozenset[str]) -> None:
        """Drop the accounts of tenants that no longer exist and have no open requests."""
        for tenant in [t for t, account in self.accounts.items() if t not in known and not account.num_open]:
            del self.accounts[tenant]

    def _charge(self, account: Account, requests: float, tokens: float) -> None:
        if account.requests is not None:
            account.requests.level -= requests
        if account.tokens is not None:
            account.tokens.level -= tokens


def over_quota(tenant: str, quota: str, limit: float | None, wait: float) -> QuotaExceeded:
    seconds = min(MAX_WAIT_SECONDS, max(MIN_RETRY_SECONDS, wait))
    whose = f"tenant {tenant!r}" if tenant else "the default tenant"
    error = QuotaExceeded(
        f"{whose} has used up its quota {quota} = {limit:g}; retry in {seconds:.0f} s",
        reason=QUEUE_FULL,
        retry_after_seconds=seconds,
    )
    error.quota = quota
    return error
