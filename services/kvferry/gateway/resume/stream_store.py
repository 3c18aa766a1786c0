"""The records of a pool's streams in Redis: two scripts, which check epochs and count bytes.

| key | content |
| --- | --- |
| `{kvferry:POOL}:TENANT:STREAM` | hash: the record of a stream, see `token_batches` |
| `{kvferry:POOL}:ends` | sorted set of the records by the time at which they end, ms |
| `{kvferry:POOL}:bytes` | hash: bytes of each record, of each tenant's records, and of all |

POOL, TENANT and STREAM are keyed hashes. Records end by their time to live; the scripts subtract those that have ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvferry.gateway.state.state_client import StateClient, StateScript

_PART = "streams"
"""Label of the calls in metrics."""
_TIMEOUT_SECONDS = 2.0
"""Time limit of a write."""
CLAIM_SECONDS = 1.0
"""Time limit of reading a record, for which a client waits."""
_RECORD_BYTES, _FIELD_BYTES = 256, 64
"""Memory of a record and of one of its fields in Redis besides their values, approximate."""

_COUNTING = """
local ends, bytes = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function subtract(member)
  local size = tonumber(redis.call('HGET', bytes, 's:' .. member) or 0)
  local tenant = 't:' .. string.sub(member, 1, 16)
  redis.call('HDEL', bytes, 's:' .. member)
  redis.call('ZREM', ends, member)
  if size == 0 then return end
  if redis.call('HINCRBY', bytes, tenant, -size) <= 0 then redis.call('HDEL', bytes, tenant) end
  if redis.call('HINCRBY', bytes, 'all', -size) < 0 then redis.call('HDEL', bytes, 'all') end
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 256)) do subtract(member) end
local function count(member, size, ttl, most, most_of_tenant)
  local tenant = 't:' .. string.sub(member, 1, 16)
  local all = tonumber(redis.call('HGET', bytes, 'all') or 0)
  if all + size > most then return false end
  if tonumber(redis.call('HGET', bytes, tenant) or 0) + size > most_of_tenant then return false end
  redis.call('HINCRBY', bytes, 's:' .. member, size)
  redis.call('HINCRBY', bytes, tenant, size)
  redis.call('HINCRBY', bytes, 'all', size)
  redis.call('ZADD', ends, now + ttl, member)
  redis.call('PEXPIRE', ends, 86400000)
  redis.call('PEXPIRE', bytes, 86400000)
  return true
end
"""

_WRITE = (
    _COUNTING
    + """
local most, most_of_tenant, at, written = tonumber(ARGV[1]), tonumber(ARGV[2]), 3, {}
for number = 3, #KEYS do
  local key, member = KEYS[number], ARGV[at]
  local epoch, ttl, size, fields = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local current = redis.call('HGET', key, 'e')
  if current and current ~= epoch then
    written[#written + 1] = 1
  else
    if not current then size = size + tonumber(ARGV[at + 5]) end
    if count(member, size, ttl, most, most_of_tenant) then
      redis.call('HSET', key, 'e', epoch, unpack(ARGV, at + 6, at + 5 + 2 * fields))
      redis.call('PEXPIRE', key, ttl)
      written[#written + 1] = 0
    else
      redis.call('UNLINK', key)
      subtract(member)
      written[#written + 1] = 2
    end
  end
  at = at + 6 + 2 * fields
end
return written
"""
)

_CLAIM = (
    _COUNTING
    + """
local member, ttl, size = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('EXISTS', KEYS[3]) == 1 then size = 0 end
if not count(member, size, ttl, tonumber(ARGV[1]), tonumber(ARGV[2])) then return {} end
redis.call('HINCRBY', KEYS[3], 'e', 1)
redis.call('PEXPIRE', KEYS[3], ttl)
return redis.call('HGETALL', KEYS[3])
"""
)


class WriteResult(IntEnum):
    """Result of the write of one record."""

    OK = 0
    FENCED = 1
    """Another gateway has claimed the record."""
    FULL = 2
    """The limit of all records, or of the tenant's, is reached; the record was removed."""


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Bounds of the records of a pool in Redis, in bytes."""

    total_bytes: int = 256 << 20

    @property
    def tenant_bytes(self) -> int:
        """Limit of one tenant's records: half of all, so that others keep some."""
        return self.total_bytes // 2


@dataclass(frozen=True, slots=True)
class RecordWrite:
    """New fields of one record."""

    member: bytes
    """Name of the record, see `PoolSeal.member`."""
    epoch: int
    ttl_seconds: float
    fields: Mapping[bytes, bytes]

    @property
    def num_bytes(self) -> int:
        """Memory of the fields in Redis, approximate."""
        return sum(len(name) + len(value) + _FIELD_BYTES for name, value in self.fields.items())


class StreamStore:
    """The records of a pool's streams. Used on the event loop's thread only."""

    def __init__(self, client: StateClient, pool: str, limits: RecordLimits) -> None:
        """
        Args:
            client: calls the server.
            pool: name of the pool in keys.
            limits: bounds of all records.
        """
        self.client = client
        self._prefix = b"{kvferry:%s}:" % pool.encode()
        self._limits = limits
        self._write = client.script(_PART, _WRITE)
        self._claim = client.script(_PART, _CLAIM)

    async def write(self, writes: Sequence[RecordWrite]) -> list[WriteResult]:
        """Add fields to records, and return the result for each.

        Raises:
            StoreUnavailable: Redis did not answer in time, or with an error; the fields may have been written or not.
        """
        arguments: list[bytes | int | float] = [self._limits.total_bytes, self._limits.tenant_bytes]
        for one in writes:
            arguments += [one.member, one.epoch, round(1e3 * one.ttl_seconds), one.num_bytes, len(one.fields)]
            arguments.append(_RECORD_BYTES)
            for name, value in one.fields.items():
                arguments += [name, value]
        found = await self._run(self._write, [one.member for one in writes], arguments, _TIMEOUT_SECONDS)
        return [WriteResult(int(each)) for each in found]

    async def claim(self, member: bytes, ttl_seconds: float) -> dict[bytes, bytes] | None:
        """Raise the epoch of a record, so that no other gateway may write to it any more, and return its fields.

        Return `None` if the limit of records is reached, so that the stream has none.

        Args:
            member: name of the record; it is created if it does not exist.
            ttl_seconds: time to live.

        Raises:
            StoreUnavailable: Redis did not answer in time, or with an error.
        """
        arguments: list[bytes | int | float] = [
            self._limits.total_bytes, self._limits.tenant_bytes, member, round(1e3 * ttl_seconds), _RECORD_BYTES,
        ]  # fmt: skip
        found = await self._run(self._claim, [member], arguments, CLAIM_SECONDS)
        if not found:
            return None
        return dict(zip(found[::2], found[1::2], strict=True))

    async def _run(
        self, script: StateScript, members: Sequence[bytes], arguments: Sequence[bytes | int | float], seconds: float
    ) -> list[Any]:
        keys = [self._prefix + b"ends", self._prefix + b"bytes", *(self._prefix + member for member in members)]
        return await script.run(keys, arguments, seconds)
