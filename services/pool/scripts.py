"""The registry's atomic steps, as Redis scripts. Redis's own clock times the leases.

Keys (prefix ``blitz:``):

    models            hash   name -> ModelRecord (msgpack)
    removed           hash   name -> removal time, ms: instances of these drain
    workers           zset   worker id -> lease end, ms
    worker:<id>       hash   report (WorkerHeartbeat, msgpack), incarnation, sequence, state, epoch,
                             copies (JSON: [model hash, copy id, serial, serves] of each complete copy)
    copies:<hash>     hash   copy id -> serial of each complete copy of that model; 'retired:<sequence>:' before the
                             serial of one that may go, with the sequence of its worker's newest report by then.
                             Copy ids begin with their worker's id and a '/'.
    lease:<id>        hash   plan, model, role, epoch, expires (ms); without a role: colocated
    floors            hash   model -> end, ms, ':' and Floor (msgpack) of its colocated instances,
                             'model role' -> that of another role
    epoch, sequence   counters
    publisher         identity of this registry's event sequence
    leader:<service>  hash   owner, term; while its lease lasts
    terms             hash   service -> the last term that was given out
    leads:<owner>     while this pool process leads: every change asks for it
    cordons           hash   id of a worker that is to be free -> when it last lived, ms
    unplaced          models without a host copy (tuple of Unplaced, msgpack)
    cluster           whose registry this is
"""

from __future__ import annotations

PREFIX = "blitz:"
NOT_LEADING = "NOTLEADING"
"""First word of the error that a pool process gets when it no longer leads."""

# The last key is that which lasts while the caller leads; empty: no check.
FENCE = """
if KEYS[#KEYS] ~= '' and redis.call('EXISTS', KEYS[#KEYS]) == 0 then
  return redis.error_reply('NOTLEADING another process leads, or the lease ran out')
end
"""

NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
-- What somebody else wrote may be no number: it counts as 0.
local function number(text)
  local n = tonumber(text or '0')
  return n and n > -2^53 and n < 2^53 and n or 0
end
"""

# The copies that a worker had reported do not count any more.
FORGET_COPIES = """
local function forget_copies(prefix, listed)
  local is_json, copies = pcall(cjson.decode, listed or '[]')
  if not is_json or type(copies) ~= 'table' then return end
  for _, copy in ipairs(copies) do
    if type(copy) == 'table' and type(copy[1]) == 'string' and type(copy[2]) == 'string' then
      redis.call('HDEL', prefix .. 'copies:' .. copy[1], copy[2])
    end
  end
end
"""

# Sets `epoch` to the last epoch that was given out. Epochs are unique and grow even if Redis is emptied: they start
# at the milliseconds since 2025.
LAST_EPOCH = """
local epoch = number(redis.call('GET', KEYS[2]))
local base = now - 1735689600000
if epoch < base then epoch = base end
"""

# KEYS: workers, worker:<id>, lease:<id>
# ARGV: id, incarnation, sequence, state, report, lease_ms, epoch, prefix, copies
# Returns 1 when taken, 0 when an older report than the stored one of the same incarnation.
HEARTBEAT = (
    NOW
    + FORGET_COPIES
    + """
local known = redis.call('HMGET', KEYS[2], 'incarnation', 'sequence', 'copies')
if known[1] == ARGV[2] and number(known[2]) >= tonumber(ARGV[3]) then return 0 end
-- A new incarnation knows nothing of a plan that its predecessor was leased for.
if known[1] and known[1] ~= ARGV[2] then redis.call('DEL', KEYS[3]) end
-- A copy that was retired stays so, although reports from before still name it; unless it is another one by now, or
-- a later report says that it serves: its worker never heard that it may go, or took that back and was not heard.
local kept = {}
if known[1] == ARGV[2] then
  for _, copy in ipairs(cjson.decode(ARGV[9])) do
    local key = ARGV[8] .. 'copies:' .. copy[1]
    local sequence, serial = string.match(redis.call('HGET', key, copy[2]) or '', '^(retired:%d+:)(.*)$')
    local asked = sequence and tonumber(string.match(sequence, '%d+'))
    local back = copy[4] and sequence and tonumber(ARGV[3]) > asked
    if sequence and serial == copy[3] and not back then kept[key .. ' ' .. copy[2]] = sequence end
  end
end
forget_copies(ARGV[8], known[3])
for _, copy in ipairs(cjson.decode(ARGV[9])) do
  local key = ARGV[8] .. 'copies:' .. copy[1]
  redis.call('HSET', key, copy[2], (kept[key .. ' ' .. copy[2]] or '') .. copy[3])
end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[2], 'sequence', ARGV[3], 'state', ARGV[4],
           'report', ARGV[5], 'epoch', ARGV[7], 'copies', ARGV[9])
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[6]), ARGV[1])
-- The worker reports on the lease itself once it works under it: the lease is used up.
local leased = redis.call('HGET', KEYS[3], 'epoch')
if leased and ARGV[4] ~= 'spare' and tonumber(ARGV[7]) >= number(leased) then redis.call('DEL', KEYS[3]) end
return 1
"""
)

# KEYS: workers, worker:<id>, lease:<id>   ARGV: id, incarnation, prefix
# The worker leaves: forget it, unless a newer incarnation took its name.
LEAVE = (
    FORGET_COPIES
    + """
if redis.call('HGET', KEYS[2], 'incarnation') ~= ARGV[2] then return 0 end
forget_copies(ARGV[3], redis.call('HGET', KEYS[2], 'copies'))
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3])
return 1
"""
)

# KEYS: workers   ARGV: prefix, id...   These workers are dead.
FORGET = (
    FORGET_COPIES
    + """
for i = 2, #ARGV do
  local id = ARGV[i]
  forget_copies(ARGV[1], redis.call('HGET', ARGV[1] .. 'worker:' .. id, 'copies'))
  redis.call('ZREM', KEYS[1], id)
  redis.call('DEL', ARGV[1] .. 'worker:' .. id, ARGV[1] .. 'lease:' .. id)
end
return 1
"""
)

# KEYS: lease:<id>   ARGV: plan, model, role, epoch, expires_ms from now
PUT_LEASE = (
    NOW
    + """
redis.call('HSET', KEYS[1], 'plan', ARGV[1], 'model', ARGV[2], 'role', ARGV[3], 'epoch', ARGV[4],
           'expires', string.format('%.0f', now + tonumber(ARGV[5])))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""
)

# KEYS: workers, epoch, models   ARGV: prefix, plan, model, role, ttl_ms, then the id and incarnation of each worker
# All or none. Returns {'ok', epoch...} or {'no', id, why}.
LEASE = (
    NOW
    + """
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then return {'no', '', 'model'} end
for i = 6, #ARGV, 2 do
  local id = ARGV[i]
  local ends = redis.call('ZSCORE', KEYS[1], id)
  if not ends or tonumber(ends) <= now then return {'no', id, 'gone'} end
  local known = redis.call('HMGET', ARGV[1] .. 'worker:' .. id, 'incarnation', 'state')
  if known[1] ~= ARGV[i + 1] then return {'no', id, 'another process by now'} end
  if known[2] ~= 'spare' then return {'no', id, 'busy'} end
  local lease = redis.call('HMGET', ARGV[1] .. 'lease:' .. id, 'plan', 'expires')
  if lease[1] and lease[1] ~= ARGV[2] and number(lease[2]) > now then return {'no', id, 'leased'} end
end
local expires = now + tonumber(ARGV[5])
local out = {'ok'}
"""
    + LAST_EPOCH
    + """
for i = 6, #ARGV, 2 do
  epoch = epoch + 1
  redis.call('HSET', ARGV[1] .. 'lease:' .. ARGV[i], 'plan', ARGV[2], 'model', ARGV[3], 'role', ARGV[4],
             'epoch', string.format('%.0f', epoch), 'expires', string.format('%.0f', expires))
  redis.call('PEXPIRE', ARGV[1] .. 'lease:' .. ARGV[i], ARGV[5])
  out[#out + 1] = string.format('%.0f', epoch)
end
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
return out
"""
)

# KEYS: workers (unused), epoch   ARGV: an epoch that was given out, or 0   Returns a new one.
NEXT_EPOCH = (
    NOW
    + LAST_EPOCH
    + """
epoch = string.format('%.0f', math.max(epoch, tonumber(ARGV[1])) + 1)
redis.call('SET', KEYS[2], epoch)
return epoch
"""
)

# KEYS: copies:<hash>, workers   ARGV: copy id, needed ('0': the copy may go in any case), report's sequence
# Returns 1 when the copy is retired, 0 when no other, unretired copy of a living worker is left: then it counts again.
RETIRE = (
    NOW
    + """
local mine = redis.call('HGET', KEYS[1], ARGV[1])
local serial = mine and string.gsub(mine, '^retired:%d+:', '')
local copies = redis.call('HGETALL', KEYS[1])
local may_go = ARGV[2] == '0'
for i = 1, #copies, 2 do
  local ends = redis.call('ZSCORE', KEYS[2], string.match(copies[i], '^[^/]*'))
  local counts = ends and tonumber(ends) > now and string.sub(copies[i + 1], 1, 8) ~= 'retired:'
  if copies[i] ~= ARGV[1] and counts then may_go = true end
end
if mine then redis.call('HSET', KEYS[1], ARGV[1], (may_go and 'retired:' .. ARGV[3] .. ':' or '') .. serial) end
return may_go and 1 or 0
"""
)

# KEYS: copies:<hash>   ARGV: copy id   The copy counts again.
UNRETIRE = """
local mine = redis.call('HGET', KEYS[1], ARGV[1])
if mine then
  local serial = string.gsub(mine, '^retired:%d+:', '')
  redis.call('HSET', KEYS[1], ARGV[1], serial)
end
return 1
"""

# KEYS: leader:<service>, terms, cluster   ARGV: service, owner, ttl_ms, seat, the owner's last term ('0': it never
#       led), prefix of the keys that fence ('': none), the owner's cluster ('': not asked)
# The owner leads if no other process does; or, if it never led, in place of a process that had the same seat. A new
# leader gets a new term, one that was not missed goes on with its own.
# Returns {'1', term, owner, ttl_ms, '1' if the terms were lost} or {'0', term, leader, ms that its lease has left,
# '1' if its seat is the caller's}; {'ahead'} for a last term that no leader can have had; {'other', name} where another
# cluster's registry is. Terms start at the milliseconds since 2025, and each leader adds one: a day is left for a clock
# that was set back.
LEAD = (
    NOW
    + """
if ARGV[7] ~= '' then
  redis.call('SET', KEYS[3], ARGV[7], 'NX')
  local cluster = redis.call('GET', KEYS[3])
  if cluster ~= ARGV[7] then return {'other', cluster} end
end
local newest = math.max(number(redis.call('HGET', KEYS[2], ARGV[1])), now - 1735689600000)
if tonumber(ARGV[5]) > newest + 86400000 then return {'ahead'} end
local known = redis.call('HMGET', KEYS[1], 'owner', 'term', 'seat')
local left_ms = redis.call('PTTL', KEYS[1])
local other = known[1] and known[1] ~= ARGV[2] and number(known[2]) > 0 and left_ms >= 0
if other and not (ARGV[4] ~= '' and known[3] == ARGV[4] and ARGV[5] == '0') then
  local same_seat = ARGV[4] ~= '' and known[3] == ARGV[4]
  return {'0', string.format('%.0f', number(known[2])), known[1], tostring(left_ms), same_seat and '1' or '0'}
end
local last = redis.call('HGET', KEYS[2], ARGV[1])
local term = last
if other or last ~= ARGV[5] then
  local base = math.max(number(last), tonumber(ARGV[5]), now - 1735689600000)
  term = string.format('%.0f', base + 1)
end
redis.call('HSET', KEYS[2], ARGV[1], term)
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'term', term, 'seat', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if ARGV[6] ~= '' then
  if known[1] and known[1] ~= ARGV[2] then redis.call('DEL', ARGV[6] .. known[1]) end
  redis.call('SET', ARGV[6] .. ARGV[2], term, 'PX', ARGV[3])
end
return {'1', term, ARGV[2], ARGV[3], last and '0' or '1'}
"""
)

# KEYS: leader:<service>   ARGV: owner, prefix of the keys that fence ('': none)
ABDICATE = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end
if ARGV[2] ~= '' then redis.call('DEL', ARGV[2] .. ARGV[1]) end
return 1
"""

# KEYS: a hash   ARGV: field, value...   It holds these, and nothing else.
REPLACE = """
redis.call('DEL', KEYS[1])
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

# KEYS: the hash   ARGV: field, ms ago, ...   Holds these times, and no others.
REPLACE_TIMES = (
    NOW
    + """
redis.call('DEL', KEYS[1])
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f', now - tonumber(ARGV[i + 1]))) end
return 1
"""
)

# ARGV: prefix, cursor   Returns the next cursor. What is of another type than this version writes, somebody else
# wrote: it is kept under 'unreadable:' and its name, and is not in the way.
SET_ASIDE = """
local of = {workers = 'zset', epoch = 'string', unplaced = 'string', cluster = 'string'}
for _, name in ipairs({'models', 'removed', 'floors', 'terms', 'cordons'}) do of[name] = 'hash' end
local page = redis.call('SCAN', ARGV[2], 'MATCH', ARGV[1] .. '*', 'COUNT', 1000)
local moved = {page[1]}
for _, key in ipairs(page[2]) do
  local name = string.sub(key, #ARGV[1] + 1)
  local kind = string.match(name, '^(%l+):')
  local wanted = of[name]
  if kind == 'worker' or kind == 'lease' or kind == 'copies' or kind == 'leader' then wanted = 'hash' end
  if wanted and redis.call('TYPE', key).ok ~= wanted then
    redis.call('RENAME', key, ARGV[1] .. 'unreadable:' .. name)
    moved[#moved + 1] = key
  end
end
return moved
"""

# KEYS: (fence)   ARGV: one command
CALL = "return redis.call(unpack(ARGV))"

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

# KEYS: models   ARGV: name, record, its model_hash, its added_at_s
# Returns 1 when stored in place of a record of the same model, added at the same time; 0: there is none.
SET_MODEL = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if not known then return 0 end
local record = cmsgpack.unpack(known)
if record.model_hash ~= ARGV[3] or record.added_at_s ~= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

# KEYS: floors   ARGV: field, Floor, ms that it lasts from now
SET_FLOOR = (
    NOW
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:', now + tonumber(ARGV[3])) .. ARGV[2])
return 1
"""
)

# KEYS: models, removed, floors   ARGV: name, its fields in floors...
REMOVE_MODEL = (
    NOW
    + """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], now)
redis.call('HDEL', KEYS[3], unpack(ARGV, 2))
return 1
"""
)
