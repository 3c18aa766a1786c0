"""The script that divides the quotas of tenants among the gateways of a pool.

| key | content |
| --- | --- |
| `{kvferry:POOL}:gateways` | sorted set of the gateways by the time of their last call, ms |
| `{kvferry:POOL}:q:TENANT` | hash with one field: the shared buckets of a tenant, and what each gateway has of them |

One call reports and answers for many tenants. Its time is the server's. A report has absolute values and the number of
its call, so that a call whose answer was lost is taken back by the next one, and one that arrives late is ignored. What
a gateway had goes back to the bucket when it has not called for the time of a lease.
"""

VALUES_PER_TENANT = 21
"""Number of arguments for each tenant: the last answered call, 8 for each bucket, 4 for slots."""

LEASE_SCRIPT = """
local gateways, gateway = KEYS[1], ARGV[2]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local call, lease, leaves = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
-- What someone else wrote under a key of the gateways is removed, so that it costs no other tenant its quotas.
local function is_of(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
is_of(gateways, 'zset')
-- First, since a server without memory lets a script go on whose first write frees some.
redis.call('ZREMRANGEBYSCORE', gateways, '-inf', now - lease)
redis.call('ZREMRANGEBYSCORE', gateways, now + lease, '+inf')
local returns = not redis.call('ZSCORE', gateways, gateway)
if leaves then redis.call('ZREM', gateways, gateway) else redis.call('ZADD', gateways, now, gateway) end
redis.call('PEXPIRE', gateways, 86400000)
local alive, number = {}, 0
for _, each in ipairs(redis.call('ZRANGE', gateways, 0, -1)) do alive[each] = true; number = number + 1 end

local function value(at) return tonumber(ARGV[at]) end
local function text(one) return string.format('%.17g', one) end

-- Divides one bucket; returns what the gateway has, what is left, and whether it wanted more.
local function budget(kinds, kind, at, answered)
  local rate, capacity = value(at) / 60000, value(at + 1)
  if capacity < 0 then kinds[kind] = nil; return 0, 0, 0, 0 end
  local rest, spent, firm, target = value(at + 2), value(at + 3), value(at + 4), value(at + 5)
  local need, hint = math.min(value(at + 6), capacity), value(at + 7)
  local bucket = kinds[kind]
  if not bucket then
    bucket = {l = capacity, u = now, g = {}}
    if hint >= 0 then bucket.l, bucket.r = math.min(hint, capacity), now end
  end
  local mine = bucket.g[gateway]
  if mine and returns then bucket.l, mine = bucket.l + mine.h, nil end
  local held = mine and mine.h
  if mine and kinds.n[gateway] > answered then
    bucket.l, held = bucket.l - mine.x, mine.p
  end
  local others, hungry = 0, 1
  for each, one in pairs(bucket.g) do
    if each ~= gateway then
      if alive[each] then
        others, hungry = others + math.max(0, one.h), hungry + one.w
      else
        bucket.l = bucket.l + one.h
        bucket.g[each] = nil
      end
    end
  end
  bucket.l = bucket.l + math.max(0, now - bucket.u) * rate
  bucket.u = now
  local before, owed = bucket.l, rest + spent - (held or 0)
  if held then
    bucket.l = bucket.l - owed
  elseif now - (bucket.r or -lease) >= lease then
    -- Used without an answer, and more than this gateway's part only of what the bucket has gained meanwhile.
    bucket.l = bucket.l - math.min(owed, capacity / number)
  end
  bucket.l = math.min(bucket.l, capacity - others - math.max(0, rest))
  if rest < 0 then bucket.l, rest = bucket.l + rest, 0 end
  if hungry > 1 then target = firm end
  target = math.max(target, need)
  if target <= rest then
    bucket.l, rest = bucket.l + rest - target, target
  else
    local grant = math.max(0, math.min(target - rest, math.max(bucket.l / hungry, need - rest), bucket.l))
    if need > 0 and rest + grant < need - 1e-9 then
      bucket.l, rest = bucket.l + rest, 0
    else
      bucket.l, rest = bucket.l - grant, rest + grant
    end
  end
  local short = rest < target - 1e-9 and 1 or 0
  bucket.g[gateway] = {h = rest, p = held or false, x = bucket.l - before, w = short}
  if leaves then bucket.g[gateway] = nil; bucket.l = bucket.l + rest end
  kinds[kind] = bucket
  return rest, bucket.l, short, (capacity - bucket.l) / rate
end

-- Divides the slots: as many as wanted, or equal parts if there are not enough.
local function slots(kinds, at)
  local limit, opened, firm, target = value(at), value(at + 1), value(at + 2), value(at + 3)
  if limit < 0 then kinds.c = nil; return 0, 0 end
  local all = kinds.c or {}
  local held, wants, hungry = 0, {}, false
  for each, one in pairs(all) do
    if each ~= gateway then
      if alive[each] then
        held, wants[#wants + 1], hungry = held + one.h, one.t, hungry or one.w == 1
      else
        all[each] = nil
      end
    end
  end
  if hungry then target = firm end
  target = math.max(target, opened)
  table.sort(wants)
  local left, sharers = limit, #wants + 1
  for _, want in ipairs(wants) do
    if want * sharers > left then break end
    left, sharers = left - want, sharers - 1
  end
  local given = math.max(0, math.min(target, math.ceil(left / sharers), limit - held))
  local short = given < target and 1 or 0
  all[gateway] = {h = math.max(opened, given), t = target, w = short}
  if leaves then all[gateway] = nil end
  kinds.c = all
  return given, short
end

-- Divides what a tenant has. Without calls of Redis, so that it may be tried on any content.
local function divide(kinds, at)
  for each, _ in pairs(kinds.n) do
    if not alive[each] and each ~= gateway then kinds.n[each] = nil end
  end
  if (kinds.n[gateway] or 0) >= call then return false end
  local answered = value(at)
  local requests, left, short, full = budget(kinds, 'r', at + 1, answered)
  local tokens, left_tokens, short_tokens, full_tokens = budget(kinds, 't', at + 9, answered)
  local given, short_slots = slots(kinds, at + 17)
  for _, one in ipairs({requests, left, tokens, left_tokens, given}) do
    assert(one == one and math.abs(one) < 1e15, 'no number of this script')
  end
  kinds.n[gateway] = call
  if leaves then kinds.n[gateway] = nil end
  return cmsgpack.pack(kinds), math.max(full, full_tokens, 0), table.concat({
    text(requests), text(left), short, text(tokens), text(left_tokens), short_tokens, given, short_slots}, ' ')
end

local answers = {text(number)}
for place = 2, #KEYS do
  local at = 6 + (place - 2) * 21
  is_of(KEYS[place], 'hash')
  local found, kinds = pcall(cmsgpack.unpack, redis.call('HGET', KEYS[place], 'v') or '')
  local ok, packed, full, answer = false, nil, nil, nil
  if found and type(kinds) == 'table' then ok, packed, full, answer = pcall(divide, kinds, at) end
  if not ok then packed, full, answer = divide({n = {}}, at) end
  if packed then
    redis.call('HSET', KEYS[place], 'v', packed)
    redis.call('PEXPIRE', KEYS[place], math.floor(math.min(6e8, full) + 4 * lease))
  end
  answers[#answers + 1] = answer or false
end
return answers
"""
