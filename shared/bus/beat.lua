-- Say that a part is alive, unless it has been declared dead: 0 then, else 1, or 2 if there was no beat of it before.
-- Its streams are made if they are missing: a server that was started again has forgotten them, and nobody else would
-- make them.
-- KEYS: dead, beat, members, streams... ARGV: part, registration, expiry in ms, life of the streams in ms
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local answer = 2 - redis.call('EXISTS', KEYS[2])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[1])
for i = 4, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    redis.call('XGROUP', 'CREATE', KEYS[i], 'made', '0', 'MKSTREAM')
    redis.call('XGROUP', 'DESTROY', KEYS[i], 'made')
  end
  redis.call('PEXPIRE', KEYS[i], ARGV[4])
end
return answer
