"""The registry's atomic steps, as Redis scripts. Redis's own clock times the leases.

Keys (prefix ``blitz:``):

    models            hash   name -> ModelRecord (msgpack)
    removed           hash   name -> removal time, ms: instances of these drain
    workers           zset   worker id -> lease end, ms
    worker:<id>       hash   report (WorkerHeartbeat, msgpack), incarnation, sequence, state, epoch
    lease:<id>        hash   plan, model, epoch, expires (ms)
    floors            hash   model -> Floor (msgpack)
    epoch, sequence   counters
    publisher         identity of this registry's event sequence
"""

from __future__ import annotations

NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

# KEYS: workers, worker:<id>, lease:<id>
# ARGV: id, incarnation, sequence, state, report, lease_ms, epoch
# Returns 1 when taken, 0 when an older report than the stored one of the same incarnation.
HEARTBEAT = (
    NOW
    + """
local known = redis.call('HMGET', KEYS[2], 'incarnation', 'sequence')
if known[1] == ARGV[2] and tonumber(known[2]) >= tonumber(ARGV[3]) then return 0 end
-- A new incarnation knows nothing of a plan that its predecessor was leased for.
if known[1] and known[1] ~= ARGV[2] then redis.call('DEL', KEYS[3]) end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[2], 'sequence', ARGV[3], 'state', ARGV[4],
           'report', ARGV[5], 'epoch', ARGV[7])
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[6]), ARGV[1])
-- The worker reports on the lease itself once it works under it: the lease is used up.
local leased = redis.call('HGET', KEYS[3], 'epoch')
if leased and ARGV[4] ~= 'spare' and tonumber(ARGV[7]) >= tonumber(leased) then redis.call('DEL', KEYS[3]) end
return 1
"""
)

# KEYS: workers, worker:<id>, lease:<id>   ARGV: id, incarnation
# The worker leaves: forget it, unless a newer incarnation took its name.
LEAVE = """
if redis.call('HGET', KEYS[2], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3])
return 1
"""

# KEYS: workers   ARGV: prefix   Returns the ids of workers whose lease ran out, now forgotten.
EXPIRE = (
    NOW
    + """
local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
for _, id in ipairs(dead) do
  redis.call('ZREM', KEYS[1], id)
  redis.call('DEL', ARGV[1] .. 'worker:' .. id, ARGV[1] .. 'lease:' .. id)
end
return dead
"""
)

# KEYS: workers, epoch, models   ARGV: prefix, plan, model, ttl_ms, id...
# All or none. Returns {'ok', expires, epoch...} or {'no', id, why}.
# Epochs are unique and grow even if Redis is emptied: they start at the milliseconds since 2025.
LEASE = (
    NOW
    + """
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then return {'no', '', 'model'} end
for i = 5, #ARGV do
  local id = ARGV[i]
  local ends = redis.call('ZSCORE', KEYS[1], id)
  if not ends or tonumber(ends) <= now then return {'no', id, 'gone'} end
  if redis.call('HGET', ARGV[1] .. 'worker:' .. id, 'state') ~= 'spare' then return {'no', id, 'busy'} end
  local lease = redis.call('HMGET', ARGV[1] .. 'lease:' .. id, 'plan', 'expires')
  if lease[1] and lease[1] ~= ARGV[2] and tonumber(lease[2]) > now then return {'no', id, 'leased'} end
end
local expires = now + tonumber(ARGV[4])
local out = {'ok', tostring(expires)}
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local base = now - 1735689600000
if last < base then last = base end
for i = 5, #ARGV do
  last = last + 1
  redis.call('HSET', ARGV[1] .. 'lease:' .. ARGV[i], 'plan', ARGV[2], 'model', ARGV[3],
             'epoch', string.format('%.0f', last), 'expires', string.format('%.0f', expires))
  redis.call('PEXPIRE', ARGV[1] .. 'lease:' .. ARGV[i], ARGV[4])
  out[#out + 1] = string.format('%.0f', last)
end
redis.call('SET', KEYS[2], string.format('%.0f', last))
return out
"""
)

# ARGV: prefix, plan, id...   Returns how many leases of the plan were given back.
RELEASE = """
local n = 0
for i = 3, #ARGV do
  local key = ARGV[1] .. 'lease:' .. ARGV[i]
  if redis.call('HGET', key, 'plan') == ARGV[2] then n = n + redis.call('DEL', key) end
end
return n
"""

# KEYS: models, removed   ARGV: name, record, keep_removed ('1': refuse if the name was removed)
# Returns the stored record when the name is taken, '' when stored, 'removed' when refused.
ADD_MODEL = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known then return known end
if ARGV[3] == '1' and redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 'removed' end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return ''
"""

# KEYS: models, removed, floors   ARGV: name
REMOVE_MODEL = (
    NOW
    + """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], now)
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""
)
