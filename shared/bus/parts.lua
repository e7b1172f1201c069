-- For each set return id and registration of its living parts in turn; take the others off it. One script, because a
-- part may beat for the first time between a look and a removal.
-- KEYS: members... ARGV: what a heartbeat key begins with
local found = {}
for i, members in ipairs(KEYS) do
  local living = {}
  for _, part in ipairs(redis.call('SMEMBERS', members)) do
    local registration = redis.call('GET', ARGV[1] .. part)
    if registration then
      living[#living + 1] = part
      living[#living + 1] = registration
    else
      redis.call('SREM', members, part)
    end
  end
  found[i] = living
end
return found
