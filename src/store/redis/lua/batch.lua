-- A batch: calls of one sender on some pools, in order. One that is sent again gets the answers that it got.
--
-- KEYS   seven for each pool, see ledger.lua
-- ARGV   1  the instant in ms that decides; "": Redis' own clock
--        then for each pool {sender, sequence, calls, previous}
--
-- Returns for each pool {header, answers}, or {false, what failed}: then nothing of it has changed. The header is
-- 'removed' where the pool is, and 'behind' where the sender's batch `previous` was never applied here, with the number of
-- the last one that was.

local SENDER_LIFE_MS = DAY_MS
local ARGUMENTS_MAX = 12
-- Calls that begin with a key's name, or with a charge.
local KEYED = { record = true, check = true, enforce = true }
local KEYS_AT_ONCE_MAX = 128

local batch = {}

function batch.new_state()
  local generations = { 0, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }
  return { pool.clock, pool.clock, {}, 0, 0, 0, generations, 0, 0, 0, pool.clock + HOUR_MS }
end

function batch.load(packed)
  local state = packed and unpack_message(packed) or batch.new_state()
  local ids = state[7]
  pool = { keys = pool.keys, clock = pool.clock, stepped_back = false, lag = 0, all_read = false,
    now = state[1], born = state[2], dimensions = state[3], next_deadline = state[4], next_window_end = state[5],
    accounts_made = state[6], generations = { ids[2], ids[3], ids[4], current = ids[1], emptied = {} },
    open = state[8], expires_at = state[9], lives_until = state[10], compact_at = state[11],
    counters_of = {}, accounts = {}, holds = {}, deadlines = {}, recording = {}, changed = {}, removed = {},
    ids_written = { {}, {}, {} }, ended = { settled = 0, released = 0, expired = 0 } }
end

function batch.packed_state()
  local dimensions, ids = {}, pool.generations
  for index, of in ipairs(pool.dimensions) do
    dimensions[index] = of[D.RATE] and of or ledger.without_holes(of, D.SAMPLED)
  end
  return pack({ pool.now, pool.born, dimensions, pool.next_deadline, pool.next_window_end, pool.accounts_made,
    { ids.current, ids[1], ids[2], ids[3] }, pool.open, pool.expires_at, pool.lives_until, pool.compact_at })
end

function batch.packed_field(field, value)
  local kind = field:sub(1, 1)
  if kind == ACCOUNT then return pack({ value.number, ledger.without_holes(value.head, H.TOUCHED_AT) }) end
  if kind ~= HOLD then return pack(value) end
  local of, amounts = ledger.without_holes(value, R.AMOUNTS), {}
  for index, amount in ipairs(value[R.AMOUNTS]) do
    amounts[index] = { ledger.without_holes(amount[1], 2), amount[2] }
  end
  of[R.AMOUNTS] = amounts
  return pack(of)
end

function batch.is_nothing(field, value)
  if ledger.is_special(field) then return false end
  if #value[K.MODELS] > 0 or #value[K.SHARES] > 0 then return false end
  for _, counter in ipairs(value[K.COUNTERS]) do
    if counter[2] > 0 or counter[3] > 0 or counter[4] > 0 then return false end
  end
  return true
end

-- Until when all is kept that lives now.
function batch.expiry() return max(pool.lives_until, pool.now + SENDER_LIFE_MS) + DAY_MS end

function batch.write_deadlines()
  if next(pool.deadlines) == nil then return end
  for random, deadline in pairs(pool.deadlines) do
    if deadline then
      redis.call('ZADD', pool.keys[2], deadline, random)
    else
      redis.call('ZREM', pool.keys[2], random)
    end
  end
  redis.call('PEXPIRE', pool.keys[2], string.format('%.0f', batch.expiry() - pool.now))
  pool.next_deadline = tonumber(redis.call('ZRANGE', pool.keys[2], 0, 0, 'WITHSCORES')[2]) or 0
end

function batch.write_recorders()
  if next(pool.recording) == nil then return end
  for member, is_one in pairs(pool.recording) do
    if is_one then redis.call('ZADD', pool.keys[3], 0, member) else redis.call('ZREM', pool.keys[3], member) end
  end
  redis.call('PEXPIRE', pool.keys[3], string.format('%.0f', batch.expiry() - pool.now))
end

function batch.write_ids()
  for index, written in ipairs(pool.ids_written) do
    local key, generation = pool.keys[3 + index], pool.generations[index]
    if pool.generations.emptied[index] then redis.call('UNLINK', key) end
    local fields = {}
    for id, packed in pairs(written) do
      fields[#fields + 1] = id
      fields[#fields + 1] = packed
      if #fields == 2000 then redis.call('HSET', key, unpack(fields)) fields = {} end
    end
    if #fields > 0 then redis.call('HSET', key, unpack(fields)) end
    if generation[G.ENDS] > generation[G.EXPIRES] then
      generation[G.EXPIRES] = generation[G.ENDS] + HOUR_MS
      redis.call('PEXPIRE', key, string.format('%.0f', generation[G.EXPIRES] - pool.now))
    end
  end
end

-- Everything that the calls have changed. Nothing below may fail.
function batch.save(sender, sequence, answers)
  batch.write_deadlines()
  batch.write_recorders()
  batch.write_ids()
  local gone, fields = {}, {}
  for field in pairs(pool.removed) do gone[#gone + 1] = field end
  for field, value in pairs(pool.changed) do
    if batch.is_nothing(field, value) then
      gone[#gone + 1] = field
    else
      fields[#fields + 1] = field
      fields[#fields + 1] = batch.packed_field(field, value)
    end
    if #fields >= 2000 then redis.call('HSET', pool.keys[1], unpack(fields)) fields = {} end
  end
  for first = 1, #gone, 2000 do redis.call('HDEL', pool.keys[1], unpack(gone, first, min(#gone, first + 1999))) end
  local extended = max(pool.lives_until, pool.now + SENDER_LIFE_MS) > pool.expires_at
  if extended then pool.expires_at = batch.expiry() end
  fields[#fields + 1] = BATCH .. sender
  fields[#fields + 1] = pack({ sequence, pool.now, answers })
  fields[#fields + 1] = ''
  fields[#fields + 1] = batch.packed_state()
  redis.call('HSET', pool.keys[1], unpack(fields))
  if extended then
    local life = string.format('%.0f', pool.expires_at - pool.now)
    for index = 1, 3 do redis.call('PEXPIRE', pool.keys[index], life) end
    redis.call('SET', pool.keys[7], string.format('%.0f', pool.expires_at))
  end
end

-- What the sender learns besides the answers: store/redis/wire.rs, Header.
function batch.header(repeated, vanished)
  local ids = 0
  for _, generation in ipairs(pool.generations) do
    if generation[G.ENDS] > pool.now then ids = ids + generation[G.COUNT] end
  end
  local ended = pool.ended
  return pack({ pool.clock, pool.born, pool.expires_at, repeated, vanished, pool.stepped_back, pool.open, ids,
    ended.settled, ended.released, ended.expired })
end

function batch.apply(message)
  local sender, sequence, calls, previous = message[1], message[2], message[3], message[4]
  -- The keys that most calls are about come along.
  local fields = { '', BATCH .. sender }
  for index, of in ipairs(calls) do
    local name = of[2]
    if type(name) == 'table' then name = name[2] end
    if index <= KEYS_AT_ONCE_MAX and KEYED[of[1]] then fields[#fields + 1] = name end
  end
  local stored = redis.call('HMGET', pool.keys[1], unpack(fields))
  local mark = not stored[1] and redis.call('GET', pool.keys[7])
  if mark == 'removed' then return { pack('removed') } end
  local last = stored[2] and unpack_message(stored[2])
  local done = last and last[1] or 0
  if done < previous then return { pack('behind'), pack(done) } end
  -- Without a state nothing is known of what it was the state of.
  if not stored[1] then redis.call('UNLINK', unpack(pool.keys, 2, 6)) end
  batch.load(stored[1])
  if done >= sequence then
    -- Of one that others have followed no answers are kept.
    return { batch.header(true, false), unpack(done == sequence and last[3] or {}) }
  end
  for index = 3, #fields do ledger.cache_key(fields[index], stored[index]) end
  if pool.now - pool.clock > CLOCK_STEP_MS then
    upkeep.step_back()
    pool.stepped_back = true
  end
  pool.now = max(pool.now, pool.clock)
  pool.lag = pool.now - pool.clock
  ledger.advance()
  if pool.now >= pool.compact_at then upkeep.compact() end
  local answers = {}
  for index, of in ipairs(calls) do
    if of[1] == 'remove' then
      redis.call('UNLINK', unpack(pool.keys))
      redis.call('SET', pool.keys[7], 'removed')
      return { pack('removed') }
    end
    answers[index] = pack(call[of[1]](unpack(of, 2, ARGUMENTS_MAX + 1)))
  end
  batch.save(sender, sequence, answers)
  local vanished = mark and tonumber(mark) > pool.clock or false
  return { batch.header(false, vanished), unpack(answers) }
end

pool.clock = tonumber(ARGV[1])
if not pool.clock then
  local time = redis.call('TIME')
  pool.clock = time[1] * 1000 + floor(time[2] / 1000)
end
local replies = {}
for index = 2, #ARGV do
  local first = (index - 2) * 7 + 1
  pool.keys = { unpack(KEYS, first, first + 6) }
  local succeeded, reply = pcall(batch.apply, unpack_message(ARGV[index]))
  replies[index - 1] = succeeded and reply or { false, tostring(type(reply) == 'table' and reply.err or reply) }
end
return replies
