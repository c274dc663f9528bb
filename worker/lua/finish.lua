-- Writes results and acknowledges jobs, each in one move: a result is written only if the lease is
-- still ours, and the lease goes with it, so that a job has one visible end.
-- Starts with ZREM or UNLINK, so that it works when Redis' memory is full.
-- Touches: P:job:ID, P:results:ID, P:wip:L, P:finished:L, P:failed:L, P:scheduled:L, P:queue:L,
--   P:queues, P:execution:*, P:executions:ID, P:worker:NAME, P:worker:NAME:executions, P:rl:*,
--   x:lease:Q, x:n:Q, x:deadline:Q, x:dead:Q, x:history:ID, x:batch:B, x:batch:B:done, x:outbox
-- KEYS: 1 P:worker:NAME
-- ARGV: clock, worker, result TTL, failure TTL, most attempts, a line for each job ('list id
--   execution kind prompt-tokens output-tokens delay result-bytes extra-bytes', kind 1 answer, 2
--   failure, 3 expired, 4 to be tried again after `delay` seconds), then end to end for each job its
--   result (base64) and for a failure JSON {error (base64), event (what the history keeps)}
-- Returns a code a job: 1 committed, 2 committed by us earlier, 0 fenced, 3 cancelled or deleted,
--   4 to be tried again, 5 dead

local now = time(ARGV[1])
local worker, result_ttl, failure_ttl = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local most_attempts = tonumber(ARGV[5])
local stamp, stamp_num = iso(now), num(now)
call('ZREM', X .. 'lease:', '')
-- Without options (`x`, which a claim sets too) a job can have no others of NAMES.
local PLAIN = { 'status', 'eid', 'started_at', 'est', 'batch', 'x' }
local NAMES = { 'status', 'eid', 'started_at', 'est', 'batch', 'rate_limit_key', 'dl', 'att', 'crashes',
  'max_att', 'result_ttl', 'failure_ttl', 'retries_left', 'retry_intervals', 'ckpt',
  'enqueue_at_front_on_retry', 'ghost', 'success_callback_name', 'failure_callback_name' }

-- leases of all jobs of a queue in one command
local by_base, jobs, at = {}, {}, 0
for list, id, eid, kind, prompt, output, delay, size, more in string.gmatch(ARGV[6],
  '(%S+) (%S+) (%S+) (%d) (%d+) (%d+) (%S+) (%d+) (%d+)') do
  local base = queue_of(list)
  local i = #jobs + 1
  jobs[i] = { list, id, eid, tonumber(kind), tonumber(prompt), tonumber(output), tonumber(delay),
    string.sub(ARGV[7], at + 1, at + size), string.sub(ARGV[7], at + size + 1, at + size + more) }
  at = at + size + more
  by_base[base] = by_base[base] or {}
  local t = by_base[base]
  t[#t + 1] = id .. ':' .. eid
end
local leased = {}
for base, t in pairs(by_base) do
  local scores = call('ZMSCORE', X .. 'lease:' .. base, unpack(t))
  for j, member in ipairs(t) do leased[member] = scores[j] and true or false end
end

local codes, unlink, executions, dependents, callbacks = {}, {}, {}, {}, {}
local registries, running, leases = {}, {}, {}
local good, bad, worked = 0, 0, 0

local function add(t, k, v)
  local l = t[k]
  if not l then l = {}; t[k] = l end
  l[#l + 1] = v
end

local function commit(i)
  local list, id, eid, kind, prompt_tokens, output_tokens, delay, result, extra = unpack(jobs[i])
  extra = extra ~= '' and cjson.decode(extra) or {}
  local base = queue_of(list)
  local member = id .. ':' .. eid
  local k = P .. ':job:' .. id
  local f = fields(id, PLAIN)
  if f.x or kind == 4 or not leased[member] then f = fields(id, NAMES) end
  local code
  if leased[member] and f.eid == eid and (f.status == 'started' or f.status == 'queued') then
    code = 1
  elseif leased[member] then
    abandon(base, list, id, eid, worker, now)
    code = 3
  elseif f.status and f.eid == eid and f.status ~= 'started' then
    code = 2
  elseif not f.status or f.status == 'canceled' or f.status == 'stopped' then
    code = 3
  else
    code = 0
    count(base, 'fenced', 1)
  end
  if code == 1 then
    leased[member] = false
    add(leases, base, member)
    add(running, list, member)
    executions[#executions + 1] = member
    unlink[#unlink + 1] = P .. ':execution:' .. member
    unlink[#unlink + 1] = P .. ':executions:' .. id
    local started = seconds(f.started_at)
    worked = worked + math.max(0, now - started)
    f.origin = list
    if kind == 4 then
      bad = bad + 1
      local left = f.retries_left and tonumber(f.retries_left)
      local attempts = tonumber(f.att or '0') + 1
      local again
      if left then
        again = left > 0
        if again then
          local ok, intervals = pcall(cjson.decode, f.retry_intervals or '[]')
          if not ok or type(intervals) ~= 'table' then intervals = {} end
          delay = tonumber(intervals[math.max(#intervals - left, 0) + 1] or 0) or 0
          if not (delay > 0 and delay < 1e9) then delay = 0 end
        end
      else
        again = attempts < tonumber(f.max_att or most_attempts)
      end
      if extra.event then
        local event = extra.event
        event.at, event.worker, event.event = now, worker, 'attempt failed'
        remember(id, failure_ttl, event)
      end
      call('HSET', k, 'att', attempts, 'x', '1')
      if again then
        code = 4
        count(base, 'retried', 1)
        if left then call('HSET', k, 'retries_left', left - 1) end
        if delay > 0 then
          call('HSET', k, 'status', 'scheduled')
          call('ZADD', P .. ':scheduled:' .. list, num(now + delay), id)
          limiter_release(f.rate_limit_key, id, now)
          if f.dl then call('ZADD', X .. 'deadline:' .. base, f.dl, id) end
        else
          requeue(id, f, list, f.enqueue_at_front_on_retry == '1')
          call('HSET', k, 'eid', eid)
        end
      else
        code = 5
        count(base, 'dead', 1)
        count(base, 'failed', 1)
        count_batch(f.batch, 'failed', 1)
        count_batch(f.batch, 'dead', 1)
        call('ZADD', X .. 'dead:' .. base, stamp_num, id)
        kind = 2
      end
    elseif kind == 1 then
      good = good + 1
      count(base, 'succeeded', 1)
      count_batch(f.batch, 'succeeded', 1)
    elseif kind == 3 then
      bad = bad + 1
      count(base, 'expired', 1)
      count_batch(f.batch, 'expired', 1)
    else
      bad = bad + 1
      count(base, 'failed', 1)
      count_batch(f.batch, 'failed', 1)
    end
    if code ~= 4 then
      local ttl, score
      if kind == 1 then ttl = life(f.result_ttl, result_ttl) else ttl = life(f.failure_ttl, failure_ttl) end
      if ttl < 0 then score = kind == 1 and '+inf' or '-1' else score = whole(now + ttl + SLACK) end
      local status = kind == 1 and 'finished' or 'failed'
      call('HSET', k, 'status', status, 'ended_at', stamp)
      if f.ckpt or f.crashes then call('HDEL', k, 'ckpt', kind == 1 and 'crashes' or 'ckpt') end
      if f.crashes and kind == 1 then unlink[#unlink + 1] = X .. 'history:' .. id end
      add_result(id, ttl, kind == 1 and 1 or 2, worker, eid, result, extra.error,
        num(started), stamp_num, f.x)
      if f.ghost then keep(id, -1) else keep(id, ttl) end
      local registry = P .. ':' .. status .. ':' .. list
      add(registries, registry, score)
      add(registries, registry, id)
      outstanding(base, f.est, -1)
      local p, o = string.match(f.est or '', '^(%d+),(%d+),')
      if kind == 1 and p then
        count(base, 'done_est_prompt', tonumber(p))
        count(base, 'done_est_output', tonumber(o))
        count(base, 'done_prompt', prompt_tokens)
        count(base, 'done_output', output_tokens)
      end
      batch_done(f.batch, id)
      if f.rate_limit_key then limiter_release(f.rate_limit_key, id, now) end
      dependents[#dependents + 1] = id
      local named = kind == 1 and f.success_callback_name or f.failure_callback_name
      if named and named ~= '' then callbacks[id] = true end
    end
  end
  return code
end

-- One broken record must not cost the results that came with it.
for i = 1, #jobs do
  local ok, code = pcall(commit, i)
  if not ok then
    count(queue_of(jobs[i][1]), 'broken', 1)
    code = 0
  end
  codes[i] = code
end

for base, l in pairs(leases) do call('ZREM', X .. 'lease:' .. base, unpack(l)) end
for list, l in pairs(running) do call('ZREM', P .. ':wip:' .. list, unpack(l)) end
if #unlink > 0 then call('UNLINK', unpack(unlink)) end
if #executions > 0 then call('SREM', P .. ':worker:' .. worker .. ':executions', unpack(executions)) end
for registry, l in pairs(registries) do call('ZADD', registry, unpack(l)) end
if #dependents > 0 then
  local names = {}
  for j, id in ipairs(dependents) do names[j] = P .. ':job:' .. id .. ':dependents' end
  local any = call('EXISTS', unpack(names)) > 0
  for j, id in ipairs(dependents) do
    if callbacks[id] or (any and call('EXISTS', names[j]) == 1) then
      call('RPUSH', X .. 'outbox', id)
    end
  end
end
if good + bad > 0 and call('EXISTS', KEYS[1]) == 1 then
  if call('SCARD', P .. ':worker:' .. worker .. ':executions') == 0 then
    call('HSET', KEYS[1], 'state', 'idle')
  end
  if good > 0 then call('HINCRBY', KEYS[1], 'successful_job_count', good) end
  if bad > 0 then call('HINCRBY', KEYS[1], 'failed_job_count', bad) end
  call('HINCRBYFLOAT', KEYS[1], 'total_working_time', num(worked))
end
write_counts()
return codes
