-- Deletes the records of jobs that have ended. Others are left alone.
-- Touches: P:job:ID, P:results:ID, P:finished:L, P:failed:L, P:canceled:L, P:queue:L (cancelled ids
--   that still lie there), x:ghost, x:dead:Q, x:history:ID, x:n:Q
-- KEYS: 1 P:queues
-- ARGV: clock, then ids. Returns those that were deleted.

local deleted = {}
local gone, registries = {}, {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local f = fields(id, { 'status', 'origin', 'ghost', 'att', 'crashes' })
  if f.status and f.origin and TERMINAL[f.status] then
    local base = queue_of(f.origin)
    local kind = f.status == 'stopped' and 'failed' or f.status
    local k = P .. ':' .. kind .. ':' .. f.origin
    registries[k] = registries[k] or {}
    table.insert(registries[k], id)
    for _ = 1, math.min(tonumber(f.ghost or '0'), 100) do
      if call('LREM', P .. ':queue:' .. f.origin, 1, id) == 1 then ghost(f.origin, id, -1) end
    end
    gone[#gone + 1] = P .. ':job:' .. id
    gone[#gone + 1] = P .. ':results:' .. id
    if f.att or f.crashes then gone[#gone + 1] = X .. 'history:' .. id end
    if f.status == 'failed' then call('ZREM', X .. 'dead:' .. base, id) end
    count(base, 'removed', 1)
    deleted[#deleted + 1] = id
  end
end
for k, ids in pairs(registries) do call('ZREM', k, unpack(ids)) end
if #gone > 0 then call('UNLINK', unpack(gone)) end
write_counts()
return deleted
