"""The scripts of files and of the lease in Redis, and the keys of files and batches.

| key | content |
| --- | --- |
| `{kvferry:POOL}:f:o:FILE` | hash: a file, an upload, or the results of a batch, see below |
| `{kvferry:POOL}:f:b:BATCH` | hash: a batch, see below |
| `{kvferry:POOL}:f:u:TENANT` | sorted set of a tenant's files by their numbers |
| `{kvferry:POOL}:f:w:TENANT`, `...:v:TENANT` | the same of a tenant's batches: all, and those that are not over |
| `{kvferry:POOL}:f:x` | sorted set of all files by the time at which they expire, ms |
| `{kvferry:POOL}:f:q`, `...:f:y` | sorted sets of TENANT and BATCH: not over, by number; over, by creation in s |
| `{kvferry:POOL}:f:bytes` | hash: bytes of all, of each file and batch, of each tenant's files, and the last number |
| `{kvferry:POOL}:f:lease` | hash: gateway that runs the batches, number of its lease, end of the lease in ms |

| field of a file | content |
| --- | --- |
| `r` | sealed: the record; none for an upload, and for results of a batch that is not over |
| `0`, `1`, ... and `c` | sealed chunks of the content, and their number |
| `n`, `p`, `k` | number of the file, its bytes, number of batches that are not over and read it |
| `w`, `z` | results: how often they were opened, bytes of their lines |

| field of a batch | content |
| --- | --- |
| `r`, `v` | sealed: the record; its version |
| `t`, `i`, `n`, `a` | tenant, input file, number, time of creation in s |

POOL, TENANT, FILE and BATCH are keyed hashes. A script that begins with `ROOM` is refused by a server without memory
before it has changed anything; the others go on. A reply begins with one of the codes of `ScriptReply`.
"""

from enum import IntEnum


class ScriptReply(IntEnum):
    """First number of the reply of a script of files and batches."""

    DONE = 0
    MOVED = 1
    """The object is not there, or has changed since it was read."""
    FULL = 2
    """The bound of all files and batches."""
    REFUSED = 3
    """A bound of the tenant, or a batch that reads the file."""
    FENCED = 4
    """The lease is another gateway's."""


ROOM = """
local first = redis.pcall('HINCRBY', KEYS[1] .. 'bytes', 'all', 0)
if type(first) == 'table' then return first end
"""
"""A first write that needs memory."""
FREE = "redis.call('UNLINK', KEYS[1] .. '-')\n"
"""A first write that needs no memory."""
COMMON = """
local root, now = KEYS[1], tonumber(ARGV[1])
local bytes, ends = root .. 'bytes', root .. 'x'
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local day, entry = 86400000, 128
-- A key of another type is like one that is not there: it must not end scripts that go through all tenants' objects.
local function get(key, name)
  local found = redis.pcall('HGET', key, name)
  return type(found) == 'string' and found
end
local function number(key, name) return tonumber(get(key, name) or 0) or 0 end
local function text(value) return string.format('%.0f', value) end
local function count(id, added)
  if added == 0 then return end  -- and never -0, which is no number for the server
  redis.call('HINCRBY', bytes, 's:' .. id, added)
  redis.call('HINCRBY', bytes, 'all', added)
end
local function uncount(id)
  local size = number(bytes, 's:' .. id)
  if size ~= 0 then redis.pcall('HINCRBY', bytes, 'all', -size) end
  redis.call('HDEL', bytes, 's:' .. id)
end
local function keep(...)
  for _, key in ipairs({bytes, ends, root .. 'q', root .. 'y', root .. 'lease', ...}) do
    redis.call('PEXPIRE', key, 62 * day)
  end
end
local function drop(id)
  uncount(id)
  local tenant, size = string.match(get(bytes, 'm:' .. id) or '', '^(%x+):(%d+)$')
  if tenant then
    redis.pcall('ZREM', root .. 'u:' .. tenant, id)
    if size ~= '0' then redis.pcall('HINCRBY', bytes, 'p:' .. tenant, '-' .. size) end
    if number(bytes, 'p:' .. tenant) <= 0 then redis.call('HDEL', bytes, 'p:' .. tenant) end
    redis.call('HDEL', bytes, 'm:' .. id)
  end
  redis.call('UNLINK', root .. 'o:' .. id)
  redis.call('ZREM', ends, id)
end
local function expire()
  local found = redis.call('ZRANGEBYSCORE', ends, '-inf', text(now), 'LIMIT', 0, 64)
  for _, id in ipairs(found) do
    if number(root .. 'o:' .. id, 'k') > 0 then
      redis.call('ZADD', ends, text(now + 3600000), id)
    else
      drop(id)
    end
  end
  return #found
end
local function register(id, tenant, size, expires, sealed)
  local key, n = root .. 'o:' .. id, redis.call('HINCRBY', bytes, 'number', 1)
  redis.call('HSET', key, 'r', sealed, 'n', n, 'p', size)
  redis.call('HSETNX', key, 'c', 0)
  redis.call('HSET', bytes, 'm:' .. id, tenant .. ':' .. size)
  redis.call('HINCRBY', bytes, 'p:' .. tenant, size)
  redis.call('ZADD', root .. 'u:' .. tenant, n, id)
  redis.call('ZADD', ends, expires, id)
  redis.call('PEXPIRE', key, text(math.max(tonumber(expires) - now, 0) + 2 * day))
  count(id, #sealed + 4 * entry)
  keep(root .. 'u:' .. tenant)
end
local function is_fenced(gateway, lease)
  local found = redis.call('HMGET', root .. 'lease', 'g', 'n')
  return found[1] ~= gateway or found[2] ~= lease
end
-- Appends the chunks ARGV[from], ...; returns false if there is no room.
local function append(id, first, most, from)
  local key, added = root .. 'o:' .. id, 0
  for at = from, #ARGV do added = added + #ARGV[at] + entry end
  if number(bytes, 'all') + added > most then return false end
  for at = from, #ARGV do redis.call('HSET', key, text(first + at - from), ARGV[at]) end
  redis.call('HSET', key, 'c', text(first + #ARGV - from + 1))
  count(id, added)
  return true
end
"""
"""What all scripts have."""

PUT = (
    ROOM
    + COMMON
    + """
local id, first, most, ttl = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local key = root .. 'o:' .. id
expire()
if number(key, 'c') ~= first or redis.call('HEXISTS', key, 'r') == 1 then return {1} end
if not append(id, first, most, 6) then return {2, number(bytes, 'all')} end
redis.call('PEXPIRE', key, 2 * ttl)
redis.call('ZADD', ends, text(now + ttl), id)
return {0}
"""
)
"""Appends to an upload. Arguments: file, its number of chunks, bound of bytes, time to live in ms, chunks."""

ADD = (
    ROOM
    + COMMON
    + """
local id, tenant, size = ARGV[2], ARGV[4], tonumber(ARGV[5])
local key = root .. 'o:' .. id
if number(key, 'c') ~= tonumber(ARGV[3]) or redis.call('HEXISTS', key, 'r') == 1 then return {1} end
local files, stored = redis.call('ZCARD', root .. 'u:' .. tenant), number(bytes, 'p:' .. tenant)
if files >= tonumber(ARGV[6]) or stored + size > tonumber(ARGV[7]) then return {3, files, stored} end
if number(bytes, 'all') > tonumber(ARGV[8]) then return {2, number(bytes, 'all')} end
register(id, tenant, ARGV[5], ARGV[9], ARGV[10])
return {0}
"""
)
"""Makes an upload a file. Arguments: file, its number of chunks, tenant, bytes, bounds of the tenant's files and bytes,
bound of bytes, expiry in ms, record."""

TENANT_ROOM = (
    COMMON
    + """
return {0, redis.call('ZCARD', root .. 'u:' .. ARGV[2]), number(bytes, 'p:' .. ARGV[2]), number(bytes, 'all')}
"""
)
"""Returns number and bytes of a tenant's files, and the bytes of all. Arguments: tenant."""

READ = (
    COMMON
    + """
local key, from, left = root .. 'o:' .. ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local fields = redis.call('HMGET', key, 'c', 'r', 'p', 'z', 'n')
if not fields[1] then return {1} end
local size, n = tonumber(fields[3] or fields[4] or 0) or 0, tonumber(fields[5] or 0) or 0
local found = {0, tonumber(fields[1]), fields[2] or '', size, n}
for at = from, math.min(tonumber(fields[1]), from + 512) - 1 do
  if left <= 0 then break end
  local chunk = redis.call('HGET', key, text(at))
  if not chunk then return {1} end
  found[#found + 1] = chunk
  left = left - #chunk
end
return found
"""
)
"""Returns of a file the number of chunks, record, bytes and number, and chunks from one on. Arguments: file, the first
chunk, bytes after which no further chunk is returned."""

FILES = (
    COMMON
    + """
local key, found = root .. 'u:' .. ARGV[2], {0}
local order, from, to = 'ZRANGEBYSCORE', ARGV[3], ARGV[4]
if ARGV[5] == '0' then order, from, to = 'ZREVRANGEBYSCORE', to, from end
for _, id in ipairs(redis.call(order, key, from, to, 'LIMIT', 0, ARGV[6])) do
  local fields = redis.call('HMGET', root .. 'o:' .. id, 'r', 'n')
  found[#found + 1] = id
  found[#found + 1] = fields[1] or ''
  found[#found + 1] = redis.call('ZSCORE', key, id)
end
return found
"""
)
"""Returns name, record and number of files of a tenant. Arguments: tenant, range of numbers, whether ascending, how
many."""

DELETE = (
    FREE
    + COMMON
    + """
local key, owner = root .. 'o:' .. ARGV[2], redis.call('HGET', bytes, 'm:' .. ARGV[2]) or ''
if string.sub(owner, 1, #ARGV[3] + 1) ~= ARGV[3] .. ':' then return {1} end
local readers, n = number(key, 'k'), redis.call('HGET', bytes, 'number')
if readers > 0 and ARGV[4] ~= n then return {3, n} end
drop(ARGV[2])
return {0}
"""
)
"""Deletes a file. If batches read it, returns the last number of all files and batches instead. Arguments: file,
tenant, and that number as an earlier call returned it, if no batch of then reads the file in fact."""

DROP = (
    FREE
    + COMMON
    + """
drop(ARGV[2])
return {0}
"""
)
"""Deletes what an upload has written, and its file if its client was told of a failure. Arguments: file."""

EXPIRE = FREE + COMMON + "return {0, expire()}\n"
"""Deletes expired files; returns how many it found, at most 64. Arguments: none."""

OPEN_RESULTS = (
    ROOM
    + COMMON
    + """
local key = root .. 'o:' .. ARGV[2]
if is_fenced(ARGV[3], ARGV[4]) then return {4} end
redis.call('HSETNX', key, 'c', 0)
redis.call('ZADD', ends, text(now + 7 * day), ARGV[2])
redis.call('PEXPIRE', key, 8 * day)
return {0, redis.call('HINCRBY', key, 'w', 1)}
"""
)
"""Opens results, whose earlier writers are refused from then on. Arguments: file, gateway, lease."""

APPEND = (
    ROOM
    + COMMON
    + """
local id, first, size = ARGV[2], tonumber(ARGV[6]), ARGV[8]
local key = root .. 'o:' .. id
if is_fenced(ARGV[3], ARGV[4]) or redis.call('HGET', key, 'w') ~= ARGV[5] then return {4} end
if number(key, 'c') ~= first then return {1} end
if not append(id, first, tonumber(ARGV[7]), 9) then return {2, number(bytes, 'all')} end
redis.call('HINCRBY', key, 'z', size)
return {0}
"""
)
"""Appends to results. Arguments: file, gateway, lease, number of the opening, number of chunks, bound of bytes, bytes
of the lines, chunks."""

DISCARD = (
    FREE
    + COMMON
    + """
local key = root .. 'o:' .. ARGV[2]
if is_fenced(ARGV[3], ARGV[4]) then return {4} end
if number(key, 'c') == 0 and redis.call('HEXISTS', key, 'r') == 0 then drop(ARGV[2]) end
return {0}
"""
)
"""Deletes results without lines. Arguments: file, gateway, lease."""

LEASE = (
    FREE
    + COMMON
    + """
local key, gateway = root .. 'lease', ARGV[2]
local found = redis.call('HMGET', key, 'g', 'n', 'l')
if found[1] ~= gateway and tonumber(found[3] or 0) > now then return {0, 0} end
-- A time, so that a number is a later one even if the server has lost everything.
local n = found[2] or '0'
if found[1] ~= gateway then n = text(math.max(tonumber(n) + 1, now)) end
redis.call('HSET', key, 'g', gateway, 'n', n, 'l', text(now + tonumber(ARGV[3])))
return {0, tonumber(n)}
"""
)
"""Takes or extends the lease; returns its number, or 0 if it is another gateway's. Arguments: gateway, ms."""

RELEASE = (
    FREE
    + COMMON
    + """
if redis.call('HGET', root .. 'lease', 'g') == ARGV[2] then redis.call('HSET', root .. 'lease', 'l', 0) end
return {0}
"""
)
"""Ends the lease of a gateway. Arguments: gateway."""
