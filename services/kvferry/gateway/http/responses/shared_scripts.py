"""The scripts of stored responses in Redis.

| key | content |
| --- | --- |
| `{kvferry:POOL}:r:TENANT:RESPONSE` | hash: a response, see below |
| `{kvferry:POOL}:r:ends` | sorted set of all responses by the time at which they expire, ms |
| `{kvferry:POOL}:r:u:TENANT` | the same for one tenant |
| `{kvferry:POOL}:r:bytes` | hash: bytes of each response, of each tenant, and of all |

| field | content |
| --- | --- |
| `i`, `o`, `v` | sealed: the earlier response and the input items; the response; its events |
| `p`, `n` | the response that it continues (empty for none), and how many continue it |
| `d`, `c`, `z` | turns and bytes of the conversation, bytes of this turn |
| `h` | time until which a request that continues it may still be running, ms |
| `x` | set if it was deleted and is kept for those that continue it |
| `g`, `l` | in the background: gateway, end of its lease in ms |
| `k`, `f` | in the background: set if it was cancelled; set if its lease has ended |

POOL, TENANT and RESPONSE are keyed hashes. A use of a response is one of those before it as well, which expire later
than it does: of a conversation, the last turn expires or is evicted first. Only `put` begins with a write that needs
memory: a server that is full refuses it before it has changed anything, and lets the other scripts go on.
"""

_COMMON = """
local root, ends, bytes = KEYS[1], KEYS[2], KEYS[3]
local now, ttl, member = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local function owned(one) return root .. 'u:' .. string.sub(one, 1, 16) end
local function tenant(one) return 't:' .. string.sub(one, 1, 16) end
-- What someone else wrote under a key is removed, so that it costs no other tenant its responses.
local function is_of(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('UNLINK', key) end
end
local function get(one, name)
  local found = redis.pcall('HGET', root .. one, name)
  if type(found) == 'table' then return false end
  return found
end
local function number(one, name) return tonumber(get(one, name) or 0) or 0 end
local function size(name) return tonumber(redis.call('HGET', bytes, name) or 0) or 0 end
local function count(one, added)
  if added == 0 then return end  -- and never -0, which is no number for the server
  if redis.call('HINCRBY', bytes, tenant(one), added) <= 0 then redis.call('HDEL', bytes, tenant(one)) end
  if redis.call('HINCRBY', bytes, 'all', added) <= 0 then redis.call('HDEL', bytes, 'all') end
end
local function place(one, at)
  redis.call('ZADD', ends, at, one)
  redis.call('ZADD', owned(one), at, one)
end
-- Removes a response, and deleted ones before it that no other continues.
local function drop(one)
  for _ = 1, 4096 do
    local parent = get(one, 'p')
    count(one, -size('s:' .. one))
    redis.call('UNLINK', root .. one)
    redis.call('HDEL', bytes, 's:' .. one)
    redis.call('ZREM', ends, one)
    redis.call('ZREM', owned(one), one)
    if not parent or parent == '' or not get(parent, 'd') then return end
    if redis.call('HINCRBY', root .. parent, 'n', -1) > 0 or not get(parent, 'x') then return end
    local held = number(parent, 'h')
    if held > now then place(parent, held); return end
    one = parent
  end
end
-- A use of a response, and of those before it.
local function touch(one, most)
  for step = 0, most do
    local parent = get(one, 'p')
    if not parent then return end
    place(one, now + ttl + step)
    redis.call('PEXPIRE', root .. one, 2 * ttl)
    if parent == '' then return end
    one = parent
  end
end
local function begin()
  is_of(ends, 'zset')
  is_of(bytes, 'hash')
  if member then is_of(owned(member), 'zset') end
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 64)) do
    is_of(owned(one), 'zset')
    drop(one)
  end
  for _, key in ipairs({ends, bytes}) do redis.call('PEXPIRE', key, math.max(86400000, 2 * ttl)) end
  if member then redis.call('PEXPIRE', owned(member), math.max(86400000, 2 * ttl)) end
end
-- 0 not kept, 1 ended, 2 running, 3 its gateway is lost
local function state()
  if not get(member, 'd') or get(member, 'x') then return 0 end
  if get(member, 'f') then return 3 end
  if not get(member, 'g') then return 1 end
  if number(member, 'l') > now then return 2 end
  redis.call('HSET', root .. member, 'f', 1)
  return 3
end
"""
_FREE = "redis.call('UNLINK', KEYS[1] .. '-')\n"
"""A first write that needs no memory."""

PUT = (
    """
local first = redis.pcall('HINCRBY', KEYS[3], 'all', 0)
if type(first) == 'table' and not string.find(first.err, 'WRONGTYPE') then return first end
"""
    + _COMMON
    + """
local parent, gateway, lease = ARGV[4], ARGV[5], tonumber(ARGV[6])
local added, turn, most, most_of_tenant = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local turns, key = tonumber(ARGV[11]), root .. member
begin()
if gateway ~= '' and lease == 0 then
  if state() ~= 2 or get(member, 'g') ~= gateway then return {1} end
  redis.call('HDEL', key, 'g', 'l', 'k')
end
if added > most or added > most_of_tenant then drop(member); return {2} end
if get(member, 'd') then
  redis.call('HINCRBY', key, 'c', turn - number(member, 'z'))
else
  redis.call('UNLINK', key)
  local depth, chain = 1, turn
  if parent ~= '' and get(parent, 'd') then
    depth, chain = number(parent, 'd') + 1, number(parent, 'c') + turn
    redis.call('HINCRBY', root .. parent, 'n', 1)
  end
  redis.call('HSET', key, 'p', parent, 'd', depth, 'c', chain)
end
redis.call('HSET', key, 'z', turn, unpack(ARGV, 12))
if lease > 0 then redis.call('HSET', key, 'g', gateway, 'l', string.format('%.0f', now + lease)) end
count(member, added - size('s:' .. member))
redis.call('HSET', bytes, 's:' .. member, added)
touch(member, turns)
for _ = 1, 1024 do
  local name, from, limit = tenant(member), owned(member), most_of_tenant
  if size(name) <= limit then name, from, limit = 'all', ends, most end
  if size(name) <= limit then return {0} end
  local oldest = redis.call('ZRANGE', from, 0, 1, 'WITHSCORES')
  -- Of two that were used in the same millisecond, this one stays. What is newer is a turn before it.
  local at = oldest[1] == member and 3 or 1
  oldest, at = oldest[at], tonumber(oldest[at + 1])
  if not oldest then
    redis.call('HSET', bytes, name, added)  -- the server has evicted what was counted
  elseif at > now + ttl then
    break
  else
    is_of(owned(oldest), 'zset')
    drop(oldest)
  end
end
drop(member)
return {2}
"""
)
"""Writes a response. Arguments: member, the one before it, gateway and lease in ms (0 if it has ended), bytes, bytes of
the turn, limits of all and of a tenant, turns, then names and values of fields. Returns 0, 1 if it is no longer that
gateway's, or 2 if it has no room."""

READ = (
    _FREE
    + _COMMON
    + """
begin()
local found = state()
if found == 0 then return {0} end
touch(member, tonumber(ARGV[4]))
local fields = redis.call('HMGET', root .. member, 'l', 'i', 'o', 'v')
return {found, fields[1] or '', fields[2] or '', fields[3] or '', fields[4] or ''}
"""
)
"""Returns the state of a response, the end of its lease, and its values. Arguments: member, turns."""

CONTINUE = (
    _FREE
    + _COMMON
    + """
local turns, most, hold = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
begin()
local found = state()
if found == 0 or found == 2 then return {found} end
local depth, chain = number(member, 'd'), number(member, 'c')
if depth >= turns or chain >= most then return {4, depth, chain} end
local whole, one, left = {1}, member, 2 * most
for _ = 1, turns do
  local values = redis.call('HMGET', root .. one, 'i', 'o', 'p')
  if not values[1] or not values[2] or not values[3] then return {5} end
  left = left - #values[1]
  if left < 0 then return {5} end
  whole[#whole + 1], whole[#whole + 2], whole[#whole + 3] = one, values[1], values[2]
  if values[3] == '' then
    redis.call('HSET', root .. member, 'h', string.format('%.0f', now + hold))
    touch(member, turns)
    return whole
  end
  one = values[3]
end
return {5}
"""
)
"""Returns a state, or 4 with turns and bytes of a conversation at its bound, or 5 if a turn is gone; else 1, and of
each turn its member and values, the last one first. Arguments: member, most turns and bytes, time for which the
response is kept for the request in ms."""

RENEW = (
    _FREE
    + _COMMON
    + """
local gateway, lease, found = ARGV[4], tonumber(ARGV[5]), {}
member = nil
begin()
for at = 6, #ARGV do
  member = ARGV[at]
  if get(member, 'g') ~= gateway or get(member, 'f') then
    found[#found + 1] = 1
  else
    redis.call('HSET', root .. member, 'l', string.format('%.0f', now + lease))
    place(member, now + ttl)
    found[#found + 1] = get(member, 'k') and 1 or 0
  end
end
return found
"""
)
"""Extends leases; returns for each response whether it is to be ended. Arguments: nothing, gateway, lease in ms,
members."""

CANCEL = (
    _FREE
    + _COMMON
    + """
begin()
local found = state()
if found == 2 then redis.call('HSET', root .. member, 'k', 1) end
return {found}
"""
)
"""Cancels a running response; returns its state. Arguments: member."""

DELETE = (
    _FREE
    + _COMMON
    + """
begin()
local found = state()
if found == 0 then return {0} end
local held = number(member, 'h')
if number(member, 'n') <= 0 and held <= now then
  drop(member)
else
  redis.call('HSET', root .. member, 'x', 1)
  redis.call('HDEL', root .. member, 'v')
  if number(member, 'n') <= 0 then place(member, held) end
end
return {1}
"""
)
"""Deletes a response; returns whether there was one. Arguments: member."""
