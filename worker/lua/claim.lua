-- Hands out waiting jobs under a lease: pop, lease, fence, execution and status in one move, so that
-- no job is ever nowhere. The same nonce again gives the same jobs again (a lost reply).
-- Order: suspects (below), deadlines that are near, then the lists by priority with ageing and,
-- among tenants, the least served one. Accepts only ids whose job is queued and has no live lease,
-- which drops ghosts, cancelled and doubled ids and survives a stale save of the whole hash.
-- Suspects, jobs in flight when a worker died, run only beside each other: at most 8 that have one
-- crash, one alone that has more. A busy worker that meets some takes the turn and gets nothing
-- more until it is empty.
-- Starts with a harmless ZREM, so that it works when Redis' memory is full.
-- Touches: P:queue:L, P:job:ID, P:wip:L, P:execution:*, P:executions:ID, P:worker:NAME:executions,
--   P:worker:NAME, P:scheduled:L, P:rl:*, x:lease:Q, x:last:NAME, x:deadline:Q, x:ghost, x:n:Q, x:tenants:Q,
--   x:served:Q, x:turn:Q, x:broken:Q, x:batch:B and, for what it closes, what cancel.lua touches
-- KEYS: 1 P:queue:L of the first queue
-- ARGV: clock, worker, nonce, most, lease seconds, deadline horizon, ageing seconds, failure TTL,
--   result and error of an expired job, result and error of a cancelled one, then queues
-- Returns time, 1 if any queue has further lists, then, if there are jobs, a line for each ('id
--   execution list fence attempts crashes enqueued_at deadline refusal data-bytes checkpoint-bytes',
--   '-' for none; refusal says why it can't be run) and their data and checkpoints end to end: few
--   long strings, because a client takes longer over many short ones than we do over the jobs

local now = time(ARGV[1])
local worker, nonce, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
local lease_end = whole(now + tonumber(ARGV[5]))
local horizon, ageing = tonumber(ARGV[6]), tonumber(ARGV[7])
local failure_ttl = tonumber(ARGV[8])
-- A job of ours that was never started and has no options (`x`) can have no others of NAMES.
local FRESH = { 'status', 'origin', 'data', 'enqueued_at', 'batch', 'est', 'started_at', 'x' }
local NAMES = { 'status', 'eid', 'origin', 'data', 'fence', 'att', 'crashes', 'started_at',
  'enqueued_at', 'dl', 'ckpt', 'batch', 'est', 'repeats_left', 'rate_limit_key', 'ended_at', 'home',
  'ghost', 'x' }
local last_key = X .. 'last:' .. worker
local worker_set = P .. ':worker:' .. worker .. ':executions'
local stamp, stamp_num = iso(now), num(now)
call('ZREM', X .. 'lease:', '')

-- A reply is bounded in bytes too: 128 jobs of 16 MB would be a 2 GB answer.
local ENOUGH = 8 * 1024 * 1024
local lines, blobs, bytes = {}, {}, 0
local function add_row(id, eid, list, f)
  local refusal = tonumber(f.repeats_left or '0') > 0 and 'repeat' or '-'
  local data, ckpt = f.data or '', f.ckpt or ''
  lines[#lines + 1] = table.concat({ id, eid, list, f.fence, f.att or '0', f.crashes or '0',
    f.enqueued_at or '-', f.dl or '-', refusal, #data, #ckpt }, ' ')
  bytes = bytes + #data + #ckpt
  blobs[#blobs + 1] = data
  if ckpt ~= '' then blobs[#blobs + 1] = ckpt end
end

local function reply(further)
  if #lines == 0 then return { stamp_num, further } end
  return { stamp_num, further, table.concat(lines, '\n'), table.concat(blobs) }
end

local last = call('GET', last_key)
if last then
  local known = cmsgpack.unpack(last)
  if known[1] == nonce then
    for _, j in ipairs(known[2]) do
      local lease = X .. 'lease:' .. queue_of(j[3])
      if call('ZSCORE', lease, j[1] .. ':' .. j[2]) then
        call('ZADD', lease, 'XX', lease_end, j[1] .. ':' .. j[2])
        local f = fields(j[1], NAMES)
        f.fence = f.fence or '1'
        add_row(j[1], j[2], j[3], f)
      end
    end
    return reply(known[3])
  end
end

local known, further = {}, 0
local members, leases, wips = {}, {}, {}
local cancelled_batches = {}

local function batch_cancelled(batch)
  if not batch then return false end
  if cancelled_batches[batch] == nil then
    cancelled_batches[batch] = call('HEXISTS', X .. 'batch:' .. batch, 'cancel') == 1
  end
  return cancelled_batches[batch]
end

-- `list` is what the id was popped from, or nil when it is still there (found by its deadline).
-- Returns the job's tokens when it was handed out, else nil.
local function accept(id, list, base, suspects)
  local k = P .. ':job:' .. id
  local names = FRESH
  local values = redis.pcall('HMGET', k, unpack(names))
  if values.err or not string.match(id, '^[%w_-]+$') then
    count(base, 'duplicates', 1)
    return nil
  end
  if not values[6] or values[7] or values[8] or values[1] ~= 'queued' then
    names = NAMES
    values = call('HMGET', k, unpack(names))
  end
  local f = named(names, values)
  -- A job is accounted where its id was found, whatever its hash may say.
  local home = f.home or f.origin or list or base
  if queue_of(home) ~= base then home = list or base end
  if names == NAMES and string.sub(home, -8) == '.suspect' then home = base end
  local leased = f.eid and f.eid ~= '' and call('ZSCORE', X .. 'lease:' .. base, id .. ':' .. f.eid)
  if f.status ~= 'queued' or leased then
    if not list then return nil end
    if not f.status then
      if tonumber(call('HGET', X .. 'ghost', list) or '0') > 0 then
        call('HINCRBY', X .. 'ghost', list, -1)
      end
    elseif f.ghost then
      ghost(list, id, -1)
      if f.ghost == '1' and TERMINAL[f.status] and call('TTL', k) == -1 then keep(id, failure_ttl) end
    else
      count(base, 'duplicates', 1)
    end
    if leased and f.status == 'queued' then call('HSET', k, 'status', 'started') end
    return nil
  end
  if not f.est then
    f.est = string.format('%d,256,%d', math.ceil(#(f.data or '') / 2), #(f.data or ''))
    call('HSET', k, 'est', f.est)
    outstanding(base, f.est, 1)
    count(base, 'accepted', 1)
  end
  local lies = list or f.origin or base
  local crashes = tonumber(f.crashes or '0')
  if crashes > 0 and not suspects and not list then return nil end
  if f.origin ~= home then call('HSET', k, 'origin', home) end
  f.origin = home
  if f.home then
    call('HDEL', k, 'home')
  end
  if crashes > 0 and (f.started_at or '') == '' then
    crashes, f.crashes, f.att = 0, '0', '0'
    call('HDEL', k, 'crashes', 'att')
  end
  if f.dl and tonumber(f.dl) <= now or batch_cancelled(f.batch) then
    if not list then ghost(lies, id, 1) end
    if batch_cancelled(f.batch) then
      close(id, f, now, 'canceled', 'cancelled', failure_ttl, 3, ARGV[11], ARGV[12])
    else
      close(id, f, now, 'failed', 'expired', failure_ttl, 2, ARGV[9], ARGV[10])
    end
    return nil
  end
  if crashes > 0 and not suspects then
    requeue(id, f, home, false)
    return nil
  end
  if not list then ghost(lies, id, 1) end
  if f.dl then call('ZREM', X .. 'deadline:' .. base, id) end
  f.fence = tonumber(f.fence or '0') + 1
  local eid = nonce .. '-' .. #known
  local member = id .. ':' .. eid
  call('HSET', k, 'status', 'started', 'started_at', stamp, 'worker_name', worker, 'eid', eid,
    'fence', f.fence)
  if names == NAMES and not f.x then call('HSET', k, 'x', '1') end
  if f.fence > 1 or f.ended_at then call('PERSIST', k) end
  call('HSET', P .. ':execution:' .. member, 'id', eid, 'job_id', id, 'created_at', stamp_num,
    'last_heartbeat', stamp_num, 'worker_name', worker)
  if f.rate_limit_key then call('HSET', P .. ':execution:' .. member, 'rl', f.rate_limit_key) end
  call('ZADD', P .. ':executions:' .. id, '+inf', eid)
  members[#members + 1] = member
  leases[base] = leases[base] or {}
  local l = leases[base]
  l[#l + 1] = lease_end
  l[#l + 1] = member
  wips[home] = wips[home] or {}
  local w = wips[home]
  w[#w + 1] = '+inf'
  w[#w + 1] = member
  if f.ckpt then count(base, 'resumed', 1) end
  add_row(id, eid, home, f)
  known[#known + 1] = { id, eid, home }
  local p, o = string.match(f.est, '^(%d+),(%d+),')
  return tonumber(p or '0') + tonumber(o or '0')
end

-- One broken record must not cost the ids that were popped with it: it is set aside.
local function try(id, list, base, suspects)
  local ok, tokens = pcall(accept, id, list, base, suspects)
  if ok then return tokens end
  call('LPUSH', X .. 'broken:' .. base, id)
  call('LTRIM', X .. 'broken:' .. base, 0, 999)
  count(base, 'broken', 1)
end

local function take_suspects(base)
  local list = base .. '.suspect'
  local k = P .. ':queue:' .. list
  while #known < math.min(most, 8) and bytes < ENOUGH do
    local id = call('LINDEX', k, 0)
    if not id then break end
    local raw = redis.pcall('HGET', P .. ':job:' .. id, 'crashes')
    local crashes = type(raw) == 'string' and tonumber(raw) or 0
    if crashes > 1 and #known > 0 then break end
    call('LPOP', k)
    if try(id, list, base, true) and crashes > 1 then break end
  end
  return #known > 0
end

local ROUND = 1000

local function take_one_list(base, list)
  local k = P .. ':queue:' .. list
  local seen = 0
  while #known < most and seen < ROUND do
    local ids = call('LPOP', k, most - #known)
    if not ids or #ids == 0 then break end
    seen = seen + #ids
    for i, id in ipairs(ids) do
      if bytes >= ENOUGH then
        for j = #ids, i, -1 do call('LPUSH', k, ids[j]) end
        return
      end
      try(id, list, base)
    end
  end
end

local RANK = { high = 0, normal = 1, low = 2, suspect = 0 }

local function take_many_lists(base, open)
  local tenants = X .. 'tenants:' .. base
  local served, before, least = {}, {}, math.huge
  for _, o in ipairs(open) do
    if not served[o.tenant] then
      local score = call('ZSCORE', tenants, o.tenant)
      if not score then
        activate(base, o.tenant)
        score = call('ZSCORE', tenants, o.tenant)
      end
      served[o.tenant] = tonumber(score)
      before[o.tenant] = served[o.tenant]
      least = math.min(least, served[o.tenant])
    end
  end
  if least > tonumber(call('HGET', X .. 'n:' .. base, 'level') or '0') then
    call('HSET', X .. 'n:' .. base, 'level', string.format('%d', least))
  end
  local function look(o)
    o.id = call('LINDEX', P .. ':queue:' .. o.list, 0)
    if not o.id then return end
    local since = redis.pcall('HGET', P .. ':job:' .. o.id, 'enqueued_at')
    local waited = 0
    if type(since) == 'string' then waited = now - seconds(since) end
    o.rank = math.max(0, RANK[o.class] - math.floor(math.max(0, waited) / ageing))
    o.waited = waited
  end
  for _, o in ipairs(open) do look(o) end
  local seen = 0
  while #known < most and seen < ROUND and bytes < ENOUGH do
    local best
    for _, o in ipairs(open) do
      if o.id then
        local s, t = served[o.tenant], best and served[best.tenant]
        if not best or o.rank < best.rank or (o.rank == best.rank
          and (s < t or (s == t and o.waited > best.waited))) then
          best = o
        end
      end
    end
    if not best then break end
    seen = seen + 1
    call('LPOP', P .. ':queue:' .. best.list)
    local tokens = try(best.id, best.list, base)
    if tokens then served[best.tenant] = served[best.tenant] + tokens end
    look(best)
  end
  for tenant, n in pairs(served) do
    if n > before[tenant] then call('ZINCRBY', tenants, n - before[tenant], tenant) end
  end
end

local function take(base)
  local due = call('ZRANGEBYSCORE', X .. 'deadline:' .. base, '-inf', num(now + horizon),
    'LIMIT', 0, most - #known)
  for _, id in ipairs(due) do
    if bytes < ENOUGH then try(id, nil, base) end
  end
  local open = {}
  for _, list in ipairs(lists_of(base, 64)) do
    promote(list, now, 64)
    if call('LLEN', P .. ':queue:' .. list) > 0 then
      local _, class, tenant = parts(list)
      open[#open + 1] = { list = list, class = class, tenant = tenant }
    end
  end
  if #open > 1 or (open[1] and open[1].list ~= base) then further = 1 end
  if #known >= most or bytes >= ENOUGH then return end
  if #open == 1 and open[1].tenant == '' then
    take_one_list(base, open[1].list)
  elseif #open > 0 then
    take_many_lists(base, open)
  end
end

local function claim()
  local busy = call('SCARD', worker_set) > 0
  for i = 13, #ARGV do
    local base = ARGV[i]
    local turn = X .. 'turn:' .. base
    if call('EXISTS', P .. ':queue:' .. base .. '.suspect') == 1 then
      further = 1
      if not busy and #known == 0 then
        local took = take_suspects(base)
        if call('GET', turn) == worker then call('UNLINK', turn) end
        if took then return end
      else
        local holder = call('GET', turn)
        if not holder or holder == worker then
          call('SET', turn, worker, 'EX', 60)
          return
        end
      end
    end
    if call('EXISTS', X .. 'tenants:' .. base) == 1 then further = 1 end
    if #known < most and bytes < ENOUGH then take(base) end
  end
end
if most > 0 then claim() end

if #known > 0 then
  for base, l in pairs(leases) do call('ZADD', X .. 'lease:' .. base, unpack(l)) end
  for list, w in pairs(wips) do call('ZADD', P .. ':wip:' .. list, unpack(w)) end
  call('SADD', worker_set, unpack(members))
  call('SET', last_key, cmsgpack.pack({ nonce, known, further }), 'EX', 300)
  if call('EXISTS', P .. ':worker:' .. worker) == 1 then
    call('HSET', P .. ':worker:' .. worker, 'state', 'busy')
  end
end
write_counts()
return reply(further)
