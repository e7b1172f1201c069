-- All that a leader writes in one step, or nothing and 0 if the lease is not its own.
-- KEYS: lease, waiting line, trimmed streams..., written streams..., dead and beat of each part given up...
-- ARGV: owner, number of trims, least id kept per trim..., number of writes, data per write..., life of a dead key in
-- ms, settled ids...
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local trims = tonumber(ARGV[2])
local writes = tonumber(ARGV[3 + trims])
for i = 1, writes do
  redis.call('XADD', KEYS[2 + trims + i], 'NOMKSTREAM', '*', 'd', ARGV[3 + trims + i])
end
local life = ARGV[4 + trims + writes]
for i = 5 + trims + writes, #ARGV do
  redis.call('XDEL', KEYS[2], ARGV[i])
end
for i = 1, trims do
  redis.call('XTRIM', KEYS[2 + i], 'MINID', '=', ARGV[2 + i])
end
for i = 3 + trims + writes, #KEYS, 2 do
  redis.call('SET', KEYS[i], 1, 'PX', life)
  redis.call('DEL', KEYS[i + 1])
end
return 1
