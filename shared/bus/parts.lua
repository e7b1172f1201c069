-- Return id and registration of each living part in turn; take the others off the set. One script, because a part
-- may beat for the first time between a look and a removal.
-- KEYS: members. ARGV: what a heartbeat key begins with
local living = {}
for _, part in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local registration = redis.call('GET', ARGV[1] .. part)
  if registration then
    living[#living + 1] = part
    living[#living + 1] = registration
  else
    redis.call('SREM', KEYS[1], part)
  end
end
return living
