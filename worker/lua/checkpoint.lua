-- Stores how far jobs have come, for those whose lease is still ours. The first write may deny: when
-- Redis' memory is full nothing is written and the earlier checkpoint stays.
-- Touches: P:job:ID, x:lease:Q
-- KEYS: 1 P:worker:NAME
-- ARGV: clock, then for each job: list, id, execution, checkpoint. Returns 1 for each stored, else 0.

local codes = {}
for i = 2, #ARGV, 4 do
  local id, eid = ARGV[i + 1], ARGV[i + 2]
  local k = P .. ':job:' .. id
  local code = 0
  if call('ZSCORE', X .. 'lease:' .. queue_of(ARGV[i]), id .. ':' .. eid)
    and call('HGET', k, 'eid') == eid then
    call('HSET', k, 'ckpt', ARGV[i + 3], 'x', '1')
    code = 1
  end
  codes[#codes + 1] = code
end
return codes
