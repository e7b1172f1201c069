-- Say that a part is alive, unless it has been declared dead: 0 then, else 1.
-- KEYS: dead, beat, members, streams... ARGV: part, registration, expiry in ms, life of the streams in ms
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[1])
for i = 4, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[4])
end
return 1
