-- Append all to the waiting line, or none if it would then hold more than the bound (-1: no bound).
-- KEYS: stream. ARGV: bound, data...
local bound = tonumber(ARGV[1])
if bound >= 0 and redis.call('XLEN', KEYS[1]) + #ARGV - 1 > bound then
  return false
end
local ids = {}
for i = 2, #ARGV do
  ids[i - 1] = redis.call('XADD', KEYS[1], '*', 'd', ARGV[i])
end
return ids
