-- What the exporter shows, in one move and reading only: counts from LLEN and ZCARD less the counted
-- ghosts, tokens from the counters, never a walk over jobs (at most 16 ids at a list's head, to get
-- past ghosts to the oldest). Its cost grows with lists and workers, not with jobs.
-- Touches: P:queues, P:queue:L, P:job:ID, P:wip:L, P:scheduled:L, P:deferred:L, P:ready:L,
--   P:finished:L, P:failed:L, P:canceled:L, P:workers, x:facts:NAME, x:ghost, x:n:Q, x:deadline:Q,
--   x:dead:Q, x:rates:Q
-- KEYS: 1 P:queues
-- ARGV: clock, seconds within which a scheduled job counts as outstanding, number of deadline
--   horizons, the horizons in seconds ('+Inf' allowed), then queues to show even when empty
-- Returns JSON: now, queues {Q: {...}}, workers [facts]

local now = time(ARGV[1])
local soon = num(now + tonumber(ARGV[2]))
local horizons = {}
for i = 1, tonumber(ARGV[3]) do horizons[i] = ARGV[3 + i] end

local queues = {}
local function queue(base)
  local q = queues[base]
  if not q then
    q = { queued = 0, scheduled = 0, due_soon = 0, running = 0, deferred = 0, ready = 0,
      finished = 0, failed = 0, canceled = 0, oldest = 0, deadlines = {} }
    for i, h in ipairs(horizons) do
      local limit = h == '+Inf' and '+inf' or num(now + tonumber(h))
      q.deadlines[i] = call('ZCOUNT', X .. 'deadline:' .. base, '-inf', limit)
    end
    q.dead = call('ZCARD', X .. 'dead:' .. base)
    q.counters = {}
    local n = call('HGETALL', X .. 'n:' .. base)
    for i = 1, #n, 2 do q.counters[n[i]] = tonumber(n[i + 1]) end
    q.counters[''] = 0
    q.rates = { [''] = '' }
    local r = call('HGETALL', X .. 'rates:' .. base)
    for i = 1, #r, 2 do q.rates[r[i]] = r[i + 1] end
    queues[base] = q
  end
  return q
end

local function oldest(list)
  for _, id in ipairs(call('LRANGE', P .. ':queue:' .. list, 0, 15)) do
    local f = redis.pcall('HMGET', P .. ':job:' .. id, 'status', 'enqueued_at', 'created_at')
    if not f.err and f[1] == 'queued' then
      local since = seconds(f[2])
      if since == 0 then since = seconds(f[3]) end
      if since > 0 then return math.max(0, now - since) end
    end
  end
  return 0
end

for i = 4 + #horizons, #ARGV do queue(ARGV[i]) end

local prefix = P .. ':queue:'
for _, name in ipairs(call('SMEMBERS', P .. ':queues')) do
  if string.sub(name, 1, #prefix) == prefix then
    local list = string.sub(name, #prefix + 1)
    local q = queue(queue_of(list))
    local waiting = call('LLEN', name) - tonumber(call('HGET', X .. 'ghost', list) or '0')
    if waiting > 0 then
      q.queued = q.queued + waiting
      q.oldest = math.max(q.oldest, oldest(list))
    end
    q.scheduled = q.scheduled + call('ZCARD', P .. ':scheduled:' .. list)
    q.due_soon = q.due_soon + call('ZCOUNT', P .. ':scheduled:' .. list, '-inf', soon)
    q.running = q.running + call('ZCARD', P .. ':wip:' .. list)
    for _, kind in ipairs({ 'deferred', 'ready', 'finished', 'failed', 'canceled' }) do
      q[kind] = q[kind] + call('ZCARD', P .. ':' .. kind .. ':' .. list)
    end
  end
end

local workers = {}
for _, name in ipairs(call('SMEMBERS', P .. ':workers')) do
  local short = string.sub(name, #P + 9)
  local raw = call('HGETALL', X .. 'facts:' .. short)
  if #raw > 0 then
    local facts = { name = short }
    for i = 1, #raw, 2 do facts[raw[i]] = raw[i + 1] end
    workers[#workers + 1] = facts
  end
end
workers[#workers + 1] = { name = '' }

return cjson.encode({ now = num(now), queues = queues, workers = workers })
