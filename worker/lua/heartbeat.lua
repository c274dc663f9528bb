-- Extends the leases a worker holds, and its own life in RQ's books. A lease needs its entry in
-- RQ's running registry too, because RQ's own cancel and delete remove only that.
-- Starts with a harmless ZREM: refused in full memory, every lease would lapse just then.
-- Touches: x:lease:Q, P:wip:L, P:worker:NAME, P:worker:NAME:executions and, for lost ones, what
--   `abandon` in lib.lua touches
-- KEYS: 1 P:worker:NAME
-- ARGV: clock, worker, lease seconds, worker TTL, then for each job: list, id, execution
-- Returns time, 1 if the worker is in RQ's books, then the numbers (from 1) of the jobs lost.

local now = time(ARGV[1])
local worker = ARGV[2]
local lease_end = whole(now + tonumber(ARGV[3]))
call('ZREM', X .. 'lease:', '')
local known = call('EXISTS', KEYS[1])
if known == 1 then
  call('HSET', KEYS[1], 'last_heartbeat', iso(now))
  call('EXPIRE', KEYS[1], ARGV[4])
  call('EXPIRE', P .. ':worker:' .. worker .. ':executions', ARGV[4])
end
local reply = { num(now), known }
local by_list = {}
for i = 5, #ARGV, 3 do
  local list = ARGV[i]
  by_list[list] = by_list[list] or { members = {}, at = {} }
  local t = by_list[list]
  t.members[#t.members + 1] = ARGV[i + 1] .. ':' .. ARGV[i + 2]
  t.at[#t.at + 1] = i
end
for list, t in pairs(by_list) do
  local base = queue_of(list)
  local leases = call('ZMSCORE', X .. 'lease:' .. base, unpack(t.members))
  local running = call('ZMSCORE', P .. ':wip:' .. list, unpack(t.members))
  local extend = {}
  for j, member in ipairs(t.members) do
    if leases[j] and running[j] then
      extend[#extend + 1] = lease_end
      extend[#extend + 1] = member
    else
      local i = t.at[j]
      pcall(abandon, base, list, ARGV[i + 1], ARGV[i + 2], worker, now)
      reply[#reply + 1] = (i - 5) / 3 + 1
    end
  end
  if #extend > 0 then call('ZADD', X .. 'lease:' .. base, 'XX', unpack(extend)) end
end
write_counts()
return reply
