"""The scripts of batches in Redis; see `shared_scripts` for the keys."""

from kvferry.gateway.batches.shared.shared_scripts import COMMON, FREE, ROOM

_BATCHES = (
    COMMON
    + """
local function drop_batch(member)
  local tenant, id = string.sub(member, 1, 16), string.sub(member, 17)
  uncount(id)
  redis.call('UNLINK', root .. 'b:' .. id)
  redis.pcall('ZREM', root .. 'w:' .. tenant, id)
  redis.pcall('ZREM', root .. 'v:' .. tenant, id)
  redis.call('ZREM', root .. 'q', member)
  redis.call('ZREM', root .. 'y', member)
end
"""
)

ADD_BATCH = (
    ROOM
    + _BATCHES
    + """
local id, tenant, input, created = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key, file, all, open = root .. 'b:' .. id, root .. 'o:' .. input, root .. 'w:' .. tenant, root .. 'v:' .. tenant
if redis.call('ZCARD', open) >= tonumber(ARGV[6]) then return {3, redis.call('ZCARD', open)} end
if redis.call('HEXISTS', file, 'r') == 0 then return {1} end
if number(bytes, 'all') + #ARGV[9] > tonumber(ARGV[8]) then return {2, number(bytes, 'all')} end
local n = redis.call('HINCRBY', bytes, 'number', 1)
redis.call('HSET', key, 'r', ARGV[9], 'v', 0, 't', tenant, 'i', input, 'n', n, 'a', created)
redis.call('PEXPIRE', key, 40 * day)
redis.call('ZADD', all, n, id)
redis.call('ZADD', open, n, id)
redis.call('ZADD', root .. 'q', n, tenant .. id)
redis.call('HINCRBY', file, 'k', 1)
count(id, #ARGV[9] + 4 * entry)
keep(all, open)
local most = tonumber(ARGV[7])
for _, old in ipairs(redis.call('ZREVRANGE', all, most, most + 95)) do
  if not redis.call('ZSCORE', open, old) then drop_batch(tenant .. old) end
end
return {0}
"""
)
"""Adds a batch. Arguments: batch, tenant, input file, creation in s, bounds of the tenant's batches that are not over
and of all, bound of bytes, record."""

BATCH = (
    COMMON
    + """
local found = redis.call('HMGET', root .. 'b:' .. ARGV[2], 'r', 'v', 'n')
if not found[1] then return {1} end
return {0, found[1], found[2] or '', tonumber(found[3] or 0) or 0}
"""
)
"""Returns record, version and number of a batch. Arguments: batch."""

BATCHES = (
    COMMON
    + """
local found = {0}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', root .. 'w:' .. ARGV[2], ARGV[3], '-inf', 'LIMIT', 0, ARGV[4])) do
  found[#found + 1] = id
  found[#found + 1] = redis.call('HGET', root .. 'b:' .. id, 'r') or ''
end
return found
"""
)
"""Returns name and record of batches of a tenant, the newest first. Arguments: tenant, highest number, how many."""

OPEN_PAGE = 256
OPEN = (
    FREE
    + _BATCHES
    + """
local found, at = {0, ARGV[2]}, nil
for _, member in ipairs(redis.call('ZRANGEBYSCORE', root .. 'q', '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])) do
  local id = string.sub(member, 17)
  local record = get(root .. 'b:' .. id, 'r')
  found[2] = redis.call('ZSCORE', root .. 'q', member)
  if record then
    found[#found + 1] = id
    found[#found + 1] = record
  else
    drop_batch(member)  -- someone else has deleted or replaced its key
  end
end
return found
"""
)
"""Returns the last number, and name and record of batches that are not over. Arguments: the number before the first,
how many."""

CHANGE = (
    FREE
    + _BATCHES
    + """
local id, lease = ARGV[2], ARGV[5]
local key = root .. 'b:' .. id
if lease ~= '' and is_fenced(ARGV[4], lease) then return {4} end
if redis.call('HGET', key, 'v') ~= ARGV[3] then return {1} end
local found = redis.call('HMGET', key, 't', 'i', 'a')
if not (found[1] and found[2] and tonumber(found[3])) then return {1} end
count(id, #ARGV[7] - redis.call('HSTRLEN', key, 'r'))
redis.call('HSET', key, 'r', ARGV[7])
redis.call('HINCRBY', key, 'v', 1)
for at = 8, #ARGV, 5 do
  if redis.call('HEXISTS', root .. 'o:' .. ARGV[at], 'r') == 0 then register(unpack(ARGV, at, at + 4)) end
end
if ARGV[6] == '1' then
  local file = root .. 'o:' .. found[2]
  redis.call('ZREM', root .. 'q', found[1] .. id)
  redis.call('ZREM', root .. 'v:' .. found[1], id)
  redis.call('ZADD', root .. 'y', found[3], found[1] .. id)
  if number(file, 'k') > 0 then redis.call('HINCRBY', file, 'k', -1) end
end
return {0}
"""
)
"""Replaces the record of a batch. Arguments: batch, its version, gateway, lease (empty if no run writes), whether it is
over, record, and of each file that becomes visible its name, tenant, bytes, expiry in ms and record."""

DROP_BATCHES = (
    FREE
    + _BATCHES
    + """
local found = redis.call('ZRANGEBYSCORE', root .. 'y', '-inf', '(' .. ARGV[2], 'LIMIT', 0, 64)
for _, member in ipairs(found) do drop_batch(member) end
return {0, #found}
"""
)
"""Deletes batches that are over; returns how many, at most 64. Arguments: time of creation in s before which they
are deleted."""
