-- Gives dead or failed jobs another start: attempts and crashes forgotten, the old result deleted,
-- back into their list. The history stays.
-- Touches: P:job:ID, P:results:ID, P:failed:L, P:queue:L, P:queues, x:dead:Q, x:n:Q, x:deadline:Q,
--   x:batch:B
-- KEYS: 1 P:queues
-- ARGV: clock, then ids. Returns 1 for each that was put back, 0 for those that had not failed.

local now = time(ARGV[1])
local codes = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local f = fields(id, { 'status', 'origin', 'est', 'batch', 'dl', 'rate_limit_key', 'home' })
  local code = 0
  if f.origin and (f.status == 'failed' or f.status == 'stopped') then
    local base = queue_of(f.origin)
    local k = P .. ':job:' .. id
    local list = f.home or f.origin
    if string.sub(list, -8) == '.suspect' then list = base end
    local dead = call('ZREM', X .. 'dead:' .. base, id) == 1
    call('ZREM', P .. ':failed:' .. f.origin, id)
    call('UNLINK', P .. ':results:' .. id)
    call('HDEL', k, 'att', 'crashes', 'ended_at', 'home', 'dl')
    call('HSET', k, 'status', 'queued', 'origin', list, 'enqueued_at', iso(now), 'eid', '')
    call('PERSIST', k)
    push(list, id, false)
    outstanding(base, f.est, 1)
    count(base, 'requeued', 1)
    if f.status == 'failed' then
      count_batch(f.batch, 'failed', -1)
      if dead then count_batch(f.batch, 'dead', -1) end
    else
      count_batch(f.batch, 'cancelled', -1)
    end
    code = 1
  end
  codes[#codes + 1] = code
end
write_counts()
return codes
