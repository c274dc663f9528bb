-- Ends jobs that are not yet done, in whatever state they are, and says what state that was.
-- A waiting id stays in its list as a counted ghost that the next claim drops. A running one loses
-- its lease at once; its worker is told, and its late result will be refused.
-- Starts with a harmless ZREM, so that it works when Redis' memory is full.
-- Touches: P:job:ID, P:results:ID, P:wip:L, P:canceled:L, P:failed:L, P:scheduled:L, P:deferred:L,
--   P:ready:L, P:execution:*, P:executions:ID, P:worker:NAME:executions, P:rl:*, x:lease:Q, x:ghost,
--   x:n:Q, x:deadline:Q, x:batch:B, x:batch:B:done, x:outbox; publishes on P:pubsub:NAME
-- KEYS: 1 P:queues
-- ARGV: clock, 'cancelled' or 'stopped', TTL of the record, result (base64), error (base64), batch
--   or '' (only jobs of that batch), then ids
-- Returns for each id the status before ('missing' when there is no such job, 'other' when it is
--   not of the batch).

local now = time(ARGV[1])
local outcome, ttl, value, exc, only = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local status = outcome == 'stopped' and 'stopped' or 'canceled'
call('ZREM', X .. 'lease:', '')
local replies = {}
for i = 7, #ARGV do
  local id = ARGV[i]
  local f = fields(id, { 'status', 'origin', 'eid', 'batch', 'est', 'rate_limit_key', 'dl', 'worker_name' })
  local before = f.status
  if not before or not f.origin then
    before = 'missing'
  elseif only ~= '' and f.batch ~= only then
    before = 'other'
  elseif not TERMINAL[before] then
    local eid, worker = nil, nil
    local base = queue_of(f.origin)
    if f.eid and f.eid ~= '' and call('ZSCORE', X .. 'lease:' .. base, id .. ':' .. f.eid) then
      eid = f.eid
      worker = drop_execution(base, f.origin, id, eid) or f.worker_name
      if worker then
        call('PUBLISH', P .. ':pubsub:' .. worker,
          cjson.encode({ command = 'stop-execution', job_id = id, execution_id = eid }))
      end
      before = 'started'
    else
      withdraw(id, f)
    end
    close(id, f, now, status, 'cancelled', ttl, status == 'stopped' and 2 or 3, value, exc, worker, eid)
  end
  replies[#replies + 1] = before
end
write_counts()
return replies
