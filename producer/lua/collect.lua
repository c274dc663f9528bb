-- Reads results of a batch from a cursor on, in order of completion. Nothing is consumed: any
-- number of readers can each keep a cursor. A trim, made by the batch's one owner when the results
-- are safe elsewhere, shortens the list without moving cursors.
-- Touches: x:batch:B, x:batch:B:done, P:results:ID
-- KEYS: 1 x:batch:B, 2 x:batch:B:done
-- ARGV: clock, cursor, most, trim ('1': forget what lies before the cursor)
-- Returns the next cursor, then id and newest stream entry (false when its time has passed) of each.

local cursor, most = tonumber(ARGV[2]), tonumber(ARGV[3])
local trimmed = tonumber(call('HGET', KEYS[1], 'trimmed') or '0')
if ARGV[4] == '1' and cursor > trimmed and call('EXISTS', KEYS[1]) == 1 then
  call('LTRIM', KEYS[2], cursor - trimmed, -1)
  call('HSET', KEYS[1], 'trimmed', cursor)
  trimmed = cursor
end
-- A cursor beyond the list: Redis has lost writes (a fail-over, a restart), and jobs that had ended
-- will end again. What follows the list's end now is all that the reader has yet to see.
local from = math.max(math.min(cursor, trimmed + call('LLEN', KEYS[2])), trimmed)
local ids = call('LRANGE', KEYS[2], from - trimmed, from - trimmed + most - 1)
local reply = { from + #ids }
for _, id in ipairs(ids) do
  local entry = call('XREVRANGE', P .. ':results:' .. id, '+', '-', 'COUNT', 1)
  reply[#reply + 1] = { id, entry[1] and entry[1][2] or false }
end
return reply
