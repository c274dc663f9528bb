-- What all scripts share: names, time, and the moves that several of them make.
-- `P`, RQ's key prefix, is set by the loader in front of this text. Times are Redis' own; the first
-- argument of every script replaces them in tests and is empty otherwise.
-- Redis 6.2 and later; effects replication, so that TIME and random order are harmless.

local X = P .. ':x:'
local SLACK = 600
local call = redis.call

local function key(kind, name) return P .. ':' .. kind .. ':' .. name end

local function time(test)
  if test ~= '' then return tonumber(test) end
  local t = call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1e6
end

-- RQ's time format, to the millisecond: every byte is kept four times a job. Days to date by H. Hinnant's civil_from_days.
local function iso(t)
  local s = math.floor(t)
  local ms = math.floor((t - s) * 1e3)
  local days, rest = math.floor(s / 86400), s % 86400
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524)
    - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03dZ',
    yoe + era * 400 + (month <= 2 and 1 or 0), month,
    doy - math.floor((153 * mp + 2) / 5) + 1,
    math.floor(rest / 3600), math.floor(rest % 3600 / 60), rest % 60, ms)
end

local function num(t) return string.format('%.6f', t) end

-- Whole seconds for scores that many members share: Redis compares a small zset's integers without
-- parsing them, which makes a group of 64 four times as fast as with fractions.
local function whole(t) return string.format('%d', math.ceil(t)) end

-- Seconds from RQ's time format; 0 for anything else.
local known_times = {}
local function seconds(text)
  if not text then return 0 end
  if known_times[text] then return known_times[text] end
  local y, m, d, h, mi, s = string.match(text, '^(%d+)-(%d+)-(%d+)T(%d+):(%d+):([%d.]+)Z$')
  if not y then return 0 end
  y, m, d = tonumber(y), tonumber(m), tonumber(d)
  if m <= 2 then y = y - 1 end
  local era = math.floor(y / 400)
  local yoe = y - era * 400
  local doy = math.floor((153 * (m > 2 and m - 3 or m + 9) + 2) / 5) + d - 1
  local doe = yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy
  local t = (era * 146097 + doe - 719468) * 86400 + tonumber(h) * 3600 + tonumber(mi) * 60
    + tonumber(s)
  known_times[text] = t
  return t
end

-- Anyone may write a job's hash: a field that is not what it must be counts as missing, and cannot
-- break a script half-way through a group.
local function whole_field(v)
  local n = tonumber(v)
  if not n or n ~= n or n > 1e12 or n < -1e12 then return nil end
  return string.format('%d', math.floor(n))
end

-- 'prompt,output,bytes', none above 1e9: a `max_tokens` that means "no limit" must not make counters
-- that Redis can't add up.
local function estimate(v)
  local p, o, b = string.match(#v <= 60 and v or '', '^(%d+),(%d+),(%d+)$')
  if not p then return nil end
  return string.format('%d,%d,%d', math.min(tonumber(p), 1e9), math.min(tonumber(o), 1e9),
    math.min(tonumber(b), 1e9))
end

local CHECKS = {
  fence = whole_field, att = whole_field, crashes = whole_field, max_att = whole_field,
  ghost = whole_field, retries_left = whole_field, repeats_left = whole_field,
  result_ttl = whole_field, failure_ttl = whole_field, rate_limit_concurrency = whole_field,
  dl = function(v)
    local n = tonumber(v)
    return n and n == n and n > 0 and n < 1e12 and num(n) or nil
  end,
  batch = function(v) return #v <= 128 and string.match(v, '^[%w_-]+$') end,
  origin = function(v) return #v <= 300 and string.match(v, '^[%w_./@-]+$') end,
  home = function(v) return #v <= 300 and string.match(v, '^[%w_./@-]+$') end,
  enqueued_at = function(v) return #v <= 40 and string.match(v, '^[%w:.-]+$') end,
  est = estimate,
  eid = function(v) return #v <= 100 and string.match(v, '^[%w_-]*$') end,
}

local function named(names, values)
  local f = {}
  for i, name in ipairs(names) do
    local v = values[i]
    if v then
      local check = CHECKS[name]
      if check then f[name] = check(v) or nil else f[name] = v end
    end
  end
  return f
end

local function fields(id, names)
  return named(names, call('HMGET', P .. ':job:' .. id, unpack(names)))
end

-- 'Q.high@t' -> 'Q', 'high', 't'
local function parts(list)
  local base, tenant = string.match(list, '^([^@]*)@(.*)$')
  base = base or list
  local stem, class = string.match(base, '^(.*)%.(%a+)$')
  if class == 'high' or class == 'low' or class == 'suspect' then
    return stem, class, tenant or ''
  end
  return base, 'normal', tenant or ''
end

local known_queues = {}
local function queue_of(list)
  local base = known_queues[list]
  if not base then
    base = parts(list)
    known_queues[list] = base
  end
  return base
end

-- Counters are collected in tables and written once a call.
local tally = {}
local function count(base, name, n)
  if n == 0 then return end
  local t = tally[base]
  if not t then t = {}; tally[base] = t end
  t[name] = (t[name] or 0) + n
end

local batch_tally = {}
local function count_batch(batch, name, n)
  if not batch or batch == '' then return end
  local t = batch_tally[batch]
  if not t then t = {}; batch_tally[batch] = t end
  t[name] = (t[name] or 0) + n
end

local done_lists = {}
local function batch_done(batch, id)
  if not batch or batch == '' then return end
  local t = done_lists[batch]
  if not t then t = {}; done_lists[batch] = t end
  t[#t + 1] = id
end

local BATCH_TTL = 14 * 86400
local function write_counts()
  for base, t in pairs(tally) do
    for name, n in pairs(t) do
      -- Lua itself writes 1e14 so, which HINCRBY does not read.
      call('HINCRBY', X .. 'n:' .. base, name, string.format('%.0f', n))
    end
  end
  for batch, t in pairs(batch_tally) do
    local k = X .. 'batch:' .. batch
    for name, n in pairs(t) do call('HINCRBY', k, name, n) end
    call('EXPIRE', k, BATCH_TTL)
  end
  for batch, ids in pairs(done_lists) do
    local k = X .. 'batch:' .. batch .. ':done'
    call('RPUSH', k, unpack(ids))
    call('EXPIRE', k, BATCH_TTL)
  end
end

-- est = 'prompt,output,bytes'; n = 1 adds, -1 takes away
local function outstanding(base, est, n)
  local p, o, b = string.match(est or '', '^(%d+),(%d+),(%d+)$')
  if not p then return end
  count(base, 'prompt_tokens', n * tonumber(p))
  count(base, 'output_tokens', n * tonumber(o))
  count(base, 'bytes', n * tonumber(b))
end

local function ghost(list, id, n)
  local k = P .. ':job:' .. id
  call('HINCRBY', X .. 'ghost', list, n)
  local left = redis.pcall('HINCRBY', k, 'ghost', n)
  if type(left) ~= 'number' then
    left = math.max(n, 0)
    call('HSET', k, 'ghost', left)
  end
  if left <= 0 then call('HDEL', k, 'ghost') end
end

-- A tenant's score is the tokens it was served; the least served one is next. `level` is the least
-- score among those that had jobs waiting at the last claim. Who comes (back) starts there at
-- least: idling saves no credit, and what a tenant owes is kept until the others have caught up.
local function activate(base, tenant)
  local k = X .. 'tenants:' .. base
  local own = call('ZSCORE', k, tenant) or call('ZSCORE', X .. 'served:' .. base, tenant)
  local level = tonumber(call('HGET', X .. 'n:' .. base, 'level') or '0')
  call('ZADD', k, math.max(level, tonumber(own or '0')), tenant)
  call('ZREM', X .. 'served:' .. base, tenant)
end

-- Puts a waiting id into a list, at its front or its tail.
local function push(list, id, front)
  call('SADD', P .. ':queues', P .. ':queue:' .. list)
  call(front and 'LPUSH' or 'RPUSH', P .. ':queue:' .. list, id)
  local base, _, tenant = parts(list)
  if tenant ~= '' then activate(base, tenant) end
end

-- RQ's rate limits: the slot is held while queued or started; who is next moves up.
local function limiter_next(k, now)
  local limit = tonumber(call('HGET', P .. ':rl:' .. k, 'concurrency') or '0')
  local allowed, waiting = P .. ':rl:' .. k .. ':allowed', P .. ':rl:' .. k .. ':rate_limited'
  while call('ZCARD', allowed) < limit do
    local popped = call('ZPOPMIN', waiting)
    if #popped == 0 then break end
    local id = popped[1]
    local f = call('HMGET', P .. ':job:' .. id, 'origin', 'status', 'enqueue_at_front')
    if f[1] and f[2] == 'rate_limited' then
      call('ZADD', allowed, num(now), id)
      call('HSET', P .. ':job:' .. id, 'status', 'queued', 'enqueued_at', iso(now))
      push(f[1], id, f[3] == '1')
    end
  end
end

local function limiter_release(k, id, now)
  if not k or k == '' then return end
  call('ZREM', P .. ':rl:' .. k .. ':allowed', id)
  call('ZREM', P .. ':rl:' .. k .. ':rate_limited', id)
  limiter_next(k, now)
end

local function limiter_wait(k, limit, id, now)
  call('SADD', P .. ':rl-keys', k)
  call('HSET', P .. ':rl:' .. k, 'concurrency', limit)
  call('ZREM', P .. ':rl:' .. k .. ':allowed', id)
  call('ZADD', P .. ':rl:' .. k .. ':rate_limited', num(now), id)
  limiter_next(k, now)
end

-- Takes a delivery away: lease, running entry and execution, all or nothing.
local function drop_execution(base, list, id, eid, worker)
  local member = id .. ':' .. eid
  call('ZREM', X .. 'lease:' .. base, member)
  call('ZREM', P .. ':wip:' .. list, member)
  if not worker then worker = call('HGET', P .. ':execution:' .. member, 'worker_name') end
  call('UNLINK', P .. ':execution:' .. member, P .. ':executions:' .. id)
  if worker then call('SREM', P .. ':worker:' .. worker .. ':executions', member) end
  return worker
end

local TERMINAL = { finished = true, failed = true, canceled = true, stopped = true }

-- Registry scores lie SLACK after the hash's own expiry, so that RQ's clean-up, which counts
-- nothing, never sees an entry before our reaper has counted it.
local function life(own, default)
  local ttl = tonumber(own or '') or default
  if ttl == 0 then ttl = 60 end
  if ttl < 0 or ttl > 315360000 then ttl = -1 end
  return ttl
end

local function keep(id, ttl)
  if ttl < 0 then
    call('PERSIST', P .. ':job:' .. id)
  else
    call('EXPIRE', P .. ':job:' .. id, ttl)
  end
end

local function add_result(id, ttl, kind, worker, eid, value, exc, started, ended, again)
  local k = P .. ':results:' .. id
  local args = { k, '*', 'type', kind, 'worker_name', worker, 'return_value', value }
  if exc and exc ~= '' then
    args[9], args[10] = 'exc_string', exc
  end
  if eid and eid ~= '' then
    args[#args + 1] = 'execution_id'
    args[#args + 1] = eid
  end
  if started then
    args[#args + 1] = 'execution_started_at'
    args[#args + 1] = started
    args[#args + 1] = 'execution_ended_at'
    args[#args + 1] = ended
  end
  local added = redis.pcall('XADD', unpack(args))
  if type(added) == 'table' and added.err then
    call('UNLINK', k)
    call('XADD', unpack(args))
  end
  if again then call('XTRIM', k, 'MAXLEN', 10) end
  if ttl < 0 then call('PERSIST', k) else call('EXPIRE', k, ttl) end
end

local function remember(id, ttl, event)
  local k = X .. 'history:' .. id
  call('RPUSH', k, cjson.encode(event))
  call('LTRIM', k, -20, -1)
  call('EXPIRE', k, ttl)
end

-- The end of a job that never came to an answer: expired, cancelled, stopped or dead.
-- f: origin, batch, est, rate_limit_key, dl of the hash. `status` is RQ's.
local function close(id, f, now, status, outcome, ttl, kind, value, exc, worker, eid)
  local list = f.origin
  local base = queue_of(list)
  call('HSET', P .. ':job:' .. id, 'status', status, 'ended_at', iso(now), 'eid', '')
  call('HDEL', P .. ':job:' .. id, 'ckpt')
  add_result(id, ttl, kind, worker or '', eid, value, exc, nil, nil, true)
  if status == 'canceled' then
    call('ZADD', P .. ':canceled:' .. list, num(now), id)
  else
    call('ZADD', P .. ':failed:' .. list, ttl < 0 and '-1' or whole(now + ttl + SLACK), id)
  end
  if call('HEXISTS', P .. ':job:' .. id, 'ghost') == 0 then keep(id, ttl) else keep(id, -1) end
  if f.dl and f.dl ~= '' then call('ZREM', X .. 'deadline:' .. base, id) end
  outstanding(base, f.est, -1)
  count(base, outcome, 1)
  count_batch(f.batch, outcome, 1)
  batch_done(f.batch, id)
  limiter_release(f.rate_limit_key, id, now)
  if call('EXISTS', P .. ':job:' .. id .. ':dependents') == 1 then call('RPUSH', X .. 'outbox', id) end
end

-- Takes a waiting job out of the place its status names; true if it had one.
local function withdraw(id, f)
  local list = f.origin
  if f.status == 'queued' then
    ghost(list, id, 1)
    return true
  end
  for _, status in ipairs({ 'scheduled', 'deferred' }) do
    if f.status == status then
      call('ZREM', P .. ':' .. status .. ':' .. list, id)
      return true
    end
  end
  if f.status == 'ready_to_enqueue' then
    call('ZREM', P .. ':ready:' .. list, id)
    return true
  end
  return f.status == 'rate_limited' or f.status == 'created'
end

-- Scheduled jobs that fall due go to their list, through the limiter where they have one.
local function promote(list, now, max)
  local due = call('ZRANGEBYSCORE', P .. ':scheduled:' .. list, '-inf', num(now), 'LIMIT', 0, max)
  for _, id in ipairs(due) do
    call('ZREM', P .. ':scheduled:' .. list, id)
    local known, f = pcall(fields, id,
      { 'status', 'rate_limit_key', 'rate_limit_concurrency', 'enqueue_at_front' })
    if known and f.status == 'scheduled' then
      if f.rate_limit_key then
        call('HSET', P .. ':job:' .. id, 'status', 'rate_limited')
        limiter_wait(f.rate_limit_key, f.rate_limit_concurrency or 1, id, now)
      else
        call('HSET', P .. ':job:' .. id, 'status', 'queued', 'enqueued_at', iso(now))
        push(list, id, f.enqueue_at_front == '1')
      end
    end
  end
  return #due
end

-- All lists of a queue that can hold jobs now.
local CLASSES = { '.high', '', '.low' }
local function lists_of(base, most)
  local lists = {}
  for _, suffix in ipairs(CLASSES) do lists[#lists + 1] = base .. suffix end
  for _, tenant in ipairs(call('ZRANGE', X .. 'tenants:' .. base, 0, most - 1)) do
    for _, suffix in ipairs(CLASSES) do lists[#lists + 1] = base .. suffix .. '@' .. tenant end
  end
  return lists
end

-- A delivery whose running entry RQ's own cancel or delete took away: tidy up and count it.
local function abandon(base, list, id, eid, worker, now)
  local member = id .. ':' .. eid
  local limit_key = call('HGET', P .. ':execution:' .. member, 'rl')
  local held = call('ZSCORE', X .. 'lease:' .. base, member)
  drop_execution(base, list, id, eid, worker)
  local f = fields(id, { 'status', 'eid', 'est', 'batch', 'rate_limit_key', 'dl' })
  if not f.status then
    if held then count(base, 'deleted', 1) end
    limiter_release(limit_key, id, now)
  elseif held and f.eid == eid and TERMINAL[f.status] then
    call('HSET', P .. ':job:' .. id, 'eid', '')
    outstanding(base, f.est, -1)
    count(base, 'cancelled', 1)
    count_batch(f.batch, 'cancelled', 1)
    batch_done(f.batch, id)
    limiter_release(f.rate_limit_key, id, now)
  end
end

-- Back to where it waits, uncharged or charged by the caller. A job that was there when a worker
-- died waits in the suspects' list.
local function requeue(id, f, list, front)
  local base = queue_of(list)
  if f.dl then call('ZADD', X .. 'deadline:' .. base, f.dl, id) end
  local k = P .. ':job:' .. id
  if tonumber(f.crashes or '0') > 0 then
    local suspects = base .. '.suspect'
    call('HSET', k, 'status', 'queued', 'eid', '', 'origin', suspects, 'home', list)
    push(suspects, id, front)
  else
    call('HSET', k, 'status', 'queued', 'eid', '', 'origin', list)
    push(list, id, front)
  end
end
