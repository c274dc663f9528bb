-- What any worker does for all, every few seconds: takes jobs back whose lease ran out and charges
-- them a crash (too many: the dead letter), ends jobs whose deadline passed while they waited, moves
-- due scheduled jobs, counts records whose time has passed, forgets workers that are gone.
-- Starts with a harmless ZREM, so that it works when Redis' memory is full.
-- Touches: everything that `close`, `requeue`, `promote` and `drop_execution` of lib.lua touch;
--   P:finished|failed|canceled:L, x:dead:Q, P:workers, P:workers:Q, x:tenants:Q, x:served:Q
-- KEYS: 1 P:queues
-- ARGV: clock, most crashes, result TTL, failure TTL, result and error of an expired job, result and
--   error of a dead job, most leases a call, then queues
-- Returns how many leases were taken back, how many jobs died of it, how many expired.

local now = time(ARGV[1])
local most_crashes, failure_ttl = tonumber(ARGV[2]), tonumber(ARGV[4])
local most = tonumber(ARGV[9])
call('ZREM', X .. 'lease:', '')
local taken, died, expired = 0, 0, 0
local NAMES = { 'status', 'eid', 'origin', 'est', 'batch', 'rate_limit_key', 'dl', 'crashes', 'fence',
  'failure_ttl', 'ghost' }

local function take_back(base, member)
  local id, eid = string.match(member, '^(.*):([^:]*)$')
  local f = id and fields(id, NAMES) or {}
  if not id then
    call('ZREM', X .. 'lease:' .. base, member)
    return
  end
  if not f.origin or f.eid ~= eid or (f.status ~= 'started' and f.status ~= 'queued') then
    abandon(base, f.origin or base, id, eid, nil, now)
    return
  end
  local worker = drop_execution(base, f.origin, id, eid)
  taken = taken + 1
  count(base, 'lapsed', 1)
  local crashes = tonumber(f.crashes or '0') + 1
  f.crashes = tostring(crashes)
  call('HSET', P .. ':job:' .. id, 'crashes', crashes, 'x', '1')
  remember(id, failure_ttl, { at = now, event = 'worker lost', worker = worker or '?',
    fence = tonumber(f.fence or '0') })
  if crashes >= most_crashes then
    died = died + 1
    count(base, 'dead', 1)
    count_batch(f.batch, 'dead', 1)
    call('ZADD', X .. 'dead:' .. base, num(now), id)
    close(id, f, now, 'failed', 'failed', life(f.failure_ttl, failure_ttl), 2, ARGV[7], ARGV[8], worker, eid)
  else
    requeue(id, f, f.origin, true)
  end
end

local function end_one(base, id)
  local f = fields(id, NAMES)
  if not f.status or not f.origin or TERMINAL[f.status] then return end
  if f.eid and f.eid ~= '' and call('ZSCORE', X .. 'lease:' .. base, id .. ':' .. f.eid) then return end
  withdraw(id, f)
  close(id, f, now, 'failed', 'expired', life(f.failure_ttl, failure_ttl), 2, ARGV[5], ARGV[6])
  expired = expired + 1
end

local function end_expired(base)
  local k = X .. 'deadline:' .. base
  for _, id in ipairs(call('ZRANGEBYSCORE', k, '-inf', num(now), 'LIMIT', 0, 128)) do
    call('ZREM', k, id)
    if not pcall(end_one, base, id) then count(base, 'broken', 1) end
  end
end

-- Entries stay SLACK longer than the hash they name, so these have gone by themselves.
local function age_out(base, list)
  for _, kind in ipairs({ 'finished', 'failed' }) do
    local k = P .. ':' .. kind .. ':' .. list
    local gone = {}
    for _, id in ipairs(call('ZRANGEBYSCORE', k, 0, num(now + SLACK), 'LIMIT', 0, 500)) do
      if call('EXISTS', P .. ':job:' .. id) == 0 then gone[#gone + 1] = id end
    end
    if #gone > 0 then
      call('ZREM', k, unpack(gone))
      call('ZREM', X .. 'dead:' .. base, unpack(gone))
      count(base, 'removed', #gone)
    end
  end
  local k = P .. ':canceled:' .. list
  local ids = call('ZRANGEBYSCORE', k, 0, num(now - failure_ttl), 'LIMIT', 0, 500)
  for _, id in ipairs(ids) do
    if call('HEXISTS', P .. ':job:' .. id, 'ghost') == 0 then
      call('ZREM', k, id)
      call('UNLINK', P .. ':job:' .. id, P .. ':results:' .. id)
      count(base, 'removed', 1)
    end
  end
end

-- A tenant without work leaves; what it owes is kept until the others have caught up.
local function retire_tenants(base)
  local k = X .. 'tenants:' .. base
  local level = tonumber(call('HGET', X .. 'n:' .. base, 'level') or '0')
  local tenants = call('ZRANGE', k, 0, -1, 'WITHSCORES')
  for i = 1, #tenants, 2 do
    local suffix = tenants[i] == '' and '' or '@' .. tenants[i]
    local work = 0
    for _, class in ipairs(CLASSES) do
      work = work + call('LLEN', P .. ':queue:' .. base .. class .. suffix)
        + call('ZCARD', P .. ':scheduled:' .. base .. class .. suffix)
    end
    if work == 0 then
      call('ZREM', k, tenants[i])
      if tonumber(tenants[i + 1]) > level then
        call('ZADD', X .. 'served:' .. base, tenants[i + 1], tenants[i])
      end
    end
  end
  call('ZREMRANGEBYSCORE', X .. 'served:' .. base, '-inf', level)
end

for i = 10, #ARGV do
  local base = ARGV[i]
  for _, member in ipairs(call('ZRANGEBYSCORE', X .. 'lease:' .. base, '-inf', num(now), 'LIMIT', 0, most)) do
    if not pcall(take_back, base, member) then
      call('ZREM', X .. 'lease:' .. base, member)
      count(base, 'broken', 1)
    end
  end
  end_expired(base)
end

-- Only now: what was taken back may have opened a list.
local all = {}
for _, k in ipairs(call('SMEMBERS', P .. ':queues')) do
  local list = string.sub(k, #P + 8)
  local base = queue_of(list)
  all[base] = all[base] or {}
  table.insert(all[base], list)
end

for i = 10, #ARGV do
  local base = ARGV[i]
  local waiting = call('ZCARD', X .. 'lease:' .. base)
  for _, list in ipairs(all[base] or {}) do
    promote(list, now, 500)
    age_out(base, list)
    local length = call('LLEN', P .. ':queue:' .. list)
    if length == 0 then call('HDEL', X .. 'ghost', list) end
    waiting = waiting + length + call('ZCARD', P .. ':scheduled:' .. list)
      + call('ZCARD', P .. ':deferred:' .. list) + call('ZCARD', P .. ':ready:' .. list)
  end
  retire_tenants(base)
  if waiting == 0 and call('SCARD', P .. ':rl-keys') == 0 then
    call('HDEL', X .. 'n:' .. base, 'prompt_tokens', 'output_tokens', 'bytes')
    tally[base] = tally[base] or {}
    tally[base].prompt_tokens, tally[base].output_tokens, tally[base].bytes = nil, nil, nil
  end
end

for _, k in ipairs(call('SMEMBERS', P .. ':workers')) do
  if call('EXISTS', k) == 0 then
    call('SREM', P .. ':workers', k)
    for i = 10, #ARGV do call('SREM', P .. ':workers:' .. ARGV[i], k) end
  end
end
write_counts()
return { taken, died, expired }
