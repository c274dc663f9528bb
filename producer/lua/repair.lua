-- Puts one thing right after looking again, in one move, so that it may run beside workers: what a
-- reader saw may have changed since.
-- Touches: P:job:ID, P:queue:L, P:queues, P:wip:L, P:scheduled:L, P:queue:L:intermediate,
--   P:execution:*, P:executions:ID, P:worker:NAME:executions, x:lease:Q, x:ghost, x:deadline:Q
-- KEYS: 1 P:queues
-- ARGV: clock, what, queue or list, then id or member
--   stray_lease MEMBER: a lease whose job is gone or no longer this delivery
--   stray_run MEMBER: a running entry of ours (+inf) without a lease
--   nowhere ID: a job whose status names a place in which it is not
--   intermediate ID: popped by a stock worker that died before it started the job
--   ghosts LIST: count the ids in the list that wait no more (lists up to 10,000 ids)
-- Returns 1 if something was put right, else 0.

local now = time(ARGV[1])
local what, name, id = ARGV[2], ARGV[3], ARGV[4]
local base = queue_of(name)

local function split(member) return string.match(member, '^(.*):([^:]*)$') end

if what == 'stray_lease' then
  local job, eid = split(id)
  local f = job and fields(job, { 'status', 'eid', 'origin' }) or {}
  if f.eid == eid and (f.status == 'started' or f.status == 'queued') then return 0 end
  if not job then return call('ZREM', X .. 'lease:' .. base, id) end
  abandon(base, f.origin or name, job, eid, nil, now)
  write_counts()
  return 1
end

if what == 'stray_run' then
  local job, eid = split(id)
  if not job or call('ZSCORE', X .. 'lease:' .. base, id)
    or call('ZSCORE', P .. ':wip:' .. name, id) ~= 'inf' then
    return 0
  end
  drop_execution(base, name, job, eid)
  return 1
end

if what == 'nowhere' then
  local f = fields(id, { 'status', 'eid', 'origin', 'home', 'crashes', 'dl' })
  local list = f.origin
  if not list then return 0 end
  if f.eid and f.eid ~= '' and call('ZSCORE', X .. 'lease:' .. base, id .. ':' .. f.eid) then return 0 end
  if f.status == 'queued' then
    if call('LPOS', P .. ':queue:' .. list, id) then return 0 end
    push(list, id, true)
    return 1
  end
  if f.status == 'scheduled' then
    if call('ZSCORE', P .. ':scheduled:' .. list, id) then return 0 end
    return call('ZADD', P .. ':scheduled:' .. list, num(now), id)
  end
  if f.status == 'started' then
    for _, eid in ipairs(call('ZRANGE', P .. ':executions:' .. id, 0, -1)) do
      if call('ZSCORE', P .. ':wip:' .. list, id .. ':' .. eid) then return 0 end
    end
    requeue(id, f, f.home or list, true)
    return 1
  end
  return 0
end

if what == 'intermediate' then
  local k = P .. ':queue:' .. name .. ':intermediate'
  if not call('LPOS', k, id) then return 0 end
  call('LREM', k, 1, id)
  if call('HGET', P .. ':job:' .. id, 'status') == 'queued'
    and not call('LPOS', P .. ':queue:' .. name, id) then
    push(name, id, true)
  end
  return 1
end

if what == 'ghosts' then
  local k = P .. ':queue:' .. name
  local n = call('LLEN', k)
  if n > 10000 then return 0 end
  local seen, ghosts = {}, 0
  for _, one in ipairs(call('LRANGE', k, 0, -1)) do
    local status = redis.pcall('HGET', P .. ':job:' .. one, 'status')
    if status ~= 'queued' or seen[one] then ghosts = ghosts + 1 end
    seen[one] = true
  end
  local before = tonumber(call('HGET', X .. 'ghost', name) or '0')
  if before == ghosts then return 0 end
  if ghosts == 0 then call('HDEL', X .. 'ghost', name) else call('HSET', X .. 'ghost', name, ghosts) end
  return 1
end
return redis.error_reply('repair: unknown ' .. what)
