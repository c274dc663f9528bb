-- Takes in jobs, each once: the same id and data again is the same job, other data a conflict (the
-- client compares what was packed, which another zlib may have packed otherwise).
-- Safe to send again after a lost reply. The first write may deny, so that nothing at all is
-- written when Redis' memory is full.
-- Touches: P:job:ID, P:queues, P:queue:L, P:scheduled:L, x:n:Q, x:ghost, x:deadline:Q, x:tenants:Q,
--   x:served:Q, x:batch:B, x:batches
-- KEYS: 1 P:queue:L
-- ARGV: clock, L, batch or '', max queue depth or 0, max queue bytes or 0,
--   then for each job: id, data, estimate 'prompt,output,bytes', options (JSON or '')
--   options: dl deadline, at (Unix time to start), plus any field of the job hash under `set`
-- Returns a code a job: 1 taken in, 2 already there, 3 conflict, 4 batch is cancelled, 0 queue full;
--   then the queue's depth and bytes.

local now = time(ARGV[1])
local list, batch = ARGV[2], ARGV[3]
local max_depth, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
local base, _, tenant = parts(list)
local stamp = iso(now)
local codes, pushed = {}, {}

call('SADD', P .. ':queues', P .. ':queue:' .. list)
local depth, bytes = 0, 0
if max_depth > 0 then
  for _, l in ipairs(lists_of(base, 1000)) do
    depth = depth + call('LLEN', P .. ':queue:' .. l)
      - tonumber(call('HGET', X .. 'ghost', l) or '0') + call('ZCARD', P .. ':scheduled:' .. l)
  end
end
if max_bytes > 0 then bytes = tonumber(call('HGET', X .. 'n:' .. base, 'bytes') or '0') end

local closed = batch ~= '' and call('HEXISTS', X .. 'batch:' .. batch, 'cancel') == 1
local taken = 0
for i = 6, #ARGV, 4 do
  local id, data, options = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  local est = estimate(ARGV[i + 2])
  local k = P .. ':job:' .. id
  local old = call('HMGET', k, 'status', 'data')
  local size = tonumber(string.match(est, '(%d+)$'))
  local code = 1
  if old[1] or old[2] then
    code = old[2] == data and 2 or 3
  elseif closed then
    code = 4
  elseif (max_depth > 0 and depth >= max_depth) or (max_bytes > 0 and bytes + size > max_bytes) then
    code = 0
  end
  if code == 1 then
    depth, bytes, taken = depth + 1, bytes + size, taken + 1
    local f = { 'status', 'queued', 'created_at', stamp, 'enqueued_at', stamp, 'origin', list,
      'data', data, 'description', 'llm', 'est', est }
    if batch ~= '' then
      f[#f + 1] = 'batch'
      f[#f + 1] = batch
    end
    local o = options ~= '' and cjson.decode(options) or {}
    for name, value in pairs(o.set or {}) do
      f[#f + 1] = name
      f[#f + 1] = value
    end
    if options ~= '' then
      f[#f + 1] = 'x'
      f[#f + 1] = '1'
    end
    if o.dl then
      f[#f + 1] = 'dl'
      f[#f + 1] = num(o.dl)
      call('ZADD', X .. 'deadline:' .. base, num(o.dl), id)
    end
    if o.at and o.at > now then
      f[2] = 'scheduled'
      call('ZADD', P .. ':scheduled:' .. list, num(o.at), id)
    else
      pushed[#pushed + 1] = id
    end
    call('HSET', k, unpack(f))
    outstanding(base, est, 1)
  end
  codes[#codes + 1] = code
end

if taken > 0 then
  if #pushed > 0 then call('RPUSH', P .. ':queue:' .. list, unpack(pushed)) end
  if tenant ~= '' then activate(base, tenant) end
  count(base, 'accepted', taken)
  if batch ~= '' then
    if call('HSETNX', X .. 'batch:' .. batch, 'created', num(now)) == 1 then
      call('ZADD', X .. 'batches', num(now), batch)
    end
    call('HSET', X .. 'batch:' .. batch, 'queue', base)
    count_batch(batch, 'total', taken)
  end
  write_counts()
end
codes[#codes + 1] = depth
codes[#codes + 1] = bytes
return codes
