-- Make an empty stream, if there is none. A group that comes and goes leaves no entry and no id behind.
-- KEYS: stream
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[1], 'made', '0', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', KEYS[1], 'made')
end
return 1
