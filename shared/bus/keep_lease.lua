-- Renew a lease that is ours: 1 if it was. One that ran out, or went with the server's memory, is not taken again.
-- KEYS: lease. ARGV: owner, length in ms
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
