-- Where all jobs of a queue are, at one instant. Reads only.
-- Touches: P:queues, P:queue:L, P:queue:L:intermediate, P:wip:L and the other registries, P:rl:*,
--   x:ghost, x:n:Q
-- KEYS: 1 P:queues
-- ARGV: clock, queue
-- Returns accepted, waiting, running, scheduled, deferred, ready, rate limited, finished, failed,
--   cancelled, removed.

local base = ARGV[2]
local sums = { waiting = 0 }
local kinds = { 'wip', 'scheduled', 'deferred', 'ready', 'finished', 'failed', 'canceled' }
for _, kind in ipairs(kinds) do sums[kind] = 0 end
for _, k in ipairs(call('SMEMBERS', P .. ':queues')) do
  local list = string.sub(k, #P + 8)
  if queue_of(list) == base then
    sums.waiting = sums.waiting + call('LLEN', k) - tonumber(call('HGET', X .. 'ghost', list) or '0')
      + call('LLEN', k .. ':intermediate')
    for _, kind in ipairs(kinds) do
      sums[kind] = sums[kind] + call('ZCARD', P .. ':' .. kind .. ':' .. list)
    end
  end
end
local limited = 0
for _, k in ipairs(call('SMEMBERS', P .. ':rl-keys')) do
  for _, id in ipairs(call('ZRANGE', P .. ':rl:' .. k .. ':rate_limited', 0, -1)) do
    local origin = call('HGET', P .. ':job:' .. id, 'origin')
    if origin and queue_of(origin) == base then limited = limited + 1 end
  end
end
local n = call('HMGET', X .. 'n:' .. base, 'accepted', 'removed', 'deleted')
return { tonumber(n[1] or '0'), sums.waiting, sums.wip, sums.scheduled, sums.deferred, sums.ready,
  limited, sums.finished, sums.failed, sums.canceled, tonumber(n[2] or '0') + tonumber(n[3] or '0') }
