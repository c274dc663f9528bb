-- Puts jobs back where they wait, uncharged (a drain, a model that this worker does not serve), with
-- what they had done so far. Only while the lease is ours.
-- Touches: P:job:ID, P:queue:L, P:queues, P:wip:L, P:execution:*, P:executions:ID,
--   P:worker:NAME, P:worker:NAME:executions, x:lease:Q, x:n:Q, x:deadline:Q, x:tenants:Q, x:served:Q
-- KEYS: 1 P:worker:NAME
-- ARGV: clock, worker, then for each job, the last of the front first: list, id, execution, front
--   ('1' or '0'), checkpoint ('' leaves the earlier one)
-- Returns 1 for each that was put back, 0 for those no longer ours.

local now = time(ARGV[1])
local worker = ARGV[2]
call('ZREM', X .. 'lease:', '')
local codes = {}
for i = 3, #ARGV, 5 do
  local list, id, eid = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local base = queue_of(list)
  local f = fields(id, { 'status', 'eid', 'dl', 'crashes', 'est' })
  local code = 0
  if call('ZSCORE', X .. 'lease:' .. base, id .. ':' .. eid) then
    if f.eid == eid and (f.status == 'started' or f.status == 'queued') then
      drop_execution(base, list, id, eid, worker)
      if ARGV[i + 4] ~= '' then call('HSET', P .. ':job:' .. id, 'ckpt', ARGV[i + 4], 'x', '1') end
      requeue(id, f, list, ARGV[i + 3] == '1')
      count(base, 'released', 1)
      code = 1
    else
      abandon(base, list, id, eid, worker, now)
    end
  end
  codes[#codes + 1] = code
end
if call('EXISTS', KEYS[1]) == 1 and call('SCARD', P .. ':worker:' .. worker .. ':executions') == 0 then
  call('HSET', KEYS[1], 'state', 'idle')
end
write_counts()
return codes
