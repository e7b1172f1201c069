-- Return the last id that a stream gave if nothing stands after the cursor, else the cursor.
-- KEYS: stream. ARGV: cursor
if redis.call('EXISTS', KEYS[1]) == 0 or #redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', 1) > 0 then
  return ARGV[1]
end
local facts = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #facts, 2 do
  if facts[i] == 'last-generated-id' then
    return facts[i + 1]
  end
end
return redis.error_reply('ERR XINFO STREAM names no last-generated-id')
