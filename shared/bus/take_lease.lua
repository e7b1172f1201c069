-- Take a lease if it is free, or ours already: 1 if it is ours now.
-- KEYS: lease. ARGV: owner, length in ms
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
