-- A batch: calls of one sender on some pools, in order. One that is sent again gets the answers that it got.
--
-- KEYS   seven for each pool, see ledger.lua
-- ARGV   1  the instant in ms that decides; "": Redis' own clock
--        then for each pool {sender, sequence, calls}
--
-- Returns for each pool {header, answers}, or {false, what failed}: then nothing of it has changed.

local SENDER_LIFE_MS = DAY_MS
local ARGUMENTS_MAX = 11

local function load(packed)
  local state = packed and unpack_message(packed)
  if not state then
    state = { clock, clock, {}, 0, 0, 0, { 0, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }, 0, 0, 0, clock + HOUR_MS }
  end
  local ids
  now, born, dimensions, next_deadline, next_window_end, accounts_made, ids, open, expires_at, lives_until, compact_at =
    unpack(state, 1, 11)
  generations = { ids[2], ids[3], ids[4], current = ids[1], emptied = {} }
  counters_of, accounts, holds, changed, removed, deadlines, recording = {}, {}, {}, {}, {}, {}, {}
  ids_written = { {}, {}, {} }
  ended = { settled = 0, released = 0, expired = 0 }
  all_read = false
end

local function packed_state()
  local kept = {}
  for index, of in ipairs(dimensions) do
    kept[index] = without_holes(of, D.SAMPLED)
  end
  local ids = { generations.current, generations[1], generations[2], generations[3] }
  return pack({ now, born, kept, next_deadline, next_window_end, accounts_made, ids, open, expires_at, lives_until,
    compact_at })
end

local function packed_field(field, value)
  local kind = field:sub(1, 1)
  if kind == ACCOUNT then return pack({ value.number, without_holes(value.head, H.TOUCHED_AT) }) end
  if kind ~= HOLD then return pack(value) end
  local of, amounts = without_holes(value, R.AMOUNTS), {}
  for index, amount in ipairs(value[R.AMOUNTS]) do
    amounts[index] = { without_holes(amount[1], 2), amount[2] }
  end
  of[R.AMOUNTS] = amounts
  return pack(of)
end

local function is_nothing(field, value)
  if is_special(field) then return false end
  if #value[K.MODELS] > 0 or #value[K.SHARES] > 0 then return false end
  for _, counter in ipairs(value[K.COUNTERS]) do
    if counter[2] > 0 or counter[3] > 0 or counter[4] > 0 then return false end
  end
  return true
end

local function write_deadlines()
  if next(deadlines) == nil then return end
  for random, deadline in pairs(deadlines) do
    if deadline then redis.call('ZADD', keys[2], deadline, random) else redis.call('ZREM', keys[2], random) end
  end
  redis.call('PEXPIRE', keys[2], RESERVE_MS_MAX + DAY_MS)
  next_deadline = tonumber(redis.call('ZRANGE', keys[2], 0, 0, 'WITHSCORES')[2]) or 0
end

local function write_recorders()
  if next(recording) == nil then return end
  for member, is_one in pairs(recording) do
    if is_one then redis.call('ZADD', keys[3], 0, member) else redis.call('ZREM', keys[3], member) end
  end
  redis.call('PEXPIRE', keys[3], string.format('%.0f', lives_until - now + DAY_MS))
end

local function write_ids()
  for index, written in ipairs(ids_written) do
    local key, generation = keys[3 + index], generations[index]
    if generations.emptied[index] then redis.call('UNLINK', key) end
    local fields = {}
    for id, packed in pairs(written) do
      fields[#fields + 1] = id
      fields[#fields + 1] = packed
      if #fields == 2000 then redis.call('HSET', key, unpack(fields)) fields = {} end
    end
    if #fields > 0 then redis.call('HSET', key, unpack(fields)) end
    if generation[G.ENDS] > generation[G.EXPIRES] then
      generation[G.EXPIRES] = generation[G.ENDS] + HOUR_MS
      redis.call('PEXPIRE', key, string.format('%.0f', generation[G.EXPIRES] - now))
    end
  end
end

-- Everything that the calls have changed. Nothing below may fail.
local function save(sender, sequence, answers)
  write_deadlines()
  write_recorders()
  write_ids()
  local gone, fields = {}, {}
  for field in pairs(removed) do gone[#gone + 1] = field end
  for field, value in pairs(changed) do
    if is_nothing(field, value) then
      gone[#gone + 1] = field
    else
      fields[#fields + 1] = field
      fields[#fields + 1] = packed_field(field, value)
    end
    if #fields >= 2000 then redis.call('HSET', keys[1], unpack(fields)) fields = {} end
  end
  for first = 1, #gone, 2000 do redis.call('HDEL', keys[1], unpack(gone, first, min(#gone, first + 1999))) end
  local extended = max(lives_until, now + SENDER_LIFE_MS) > expires_at
  if extended then expires_at = max(lives_until, now + SENDER_LIFE_MS) + DAY_MS end
  fields[#fields + 1] = BATCH .. sender
  fields[#fields + 1] = pack({ sequence, now, answers })
  fields[#fields + 1] = ''
  fields[#fields + 1] = packed_state()
  redis.call('HSET', keys[1], unpack(fields))
  if extended then
    redis.call('PEXPIRE', keys[1], string.format('%.0f', expires_at - now))
    redis.call('SET', keys[7], string.format('%.0f', expires_at))
  end
end

-- What the sender learns besides the answers: store/redis/wire.rs, Header.
local function header(repeated, vanished)
  local ids = 0
  for _, generation in ipairs(generations) do
    if generation[G.ENDS] > now then ids = ids + generation[G.COUNT] end
  end
  return pack({ clock, born, expires_at, repeated, vanished, stepped_back, open, ids, ended.settled, ended.released,
    ended.expired })
end

local function apply(message)
  local sender, sequence, calls = message[1], message[2], message[3]
  local stored = redis.call('HMGET', keys[1], '', BATCH .. sender)
  local mark = not stored[1] and redis.call('GET', keys[7])
  if mark == 'removed' then return { pack('removed') } end
  load(stored[1])
  stepped_back = false
  local last = stored[2] and unpack_message(stored[2])
  if last and last[1] >= sequence then
    if last[1] > sequence then error('a batch older than the last one was sent') end
    return { header(true, false), unpack(last[3]) }
  end
  lag = 0
  if now - clock > CLOCK_STEP_MS then
    step_back()
    stepped_back = true
  end
  now = max(now, clock)
  lag = now - clock
  advance()
  if now >= compact_at then compact() end
  local answers = {}
  for index, message in ipairs(calls) do
    if message[1] == 'remove' then
      redis.call('UNLINK', unpack(keys))
      redis.call('SET', keys[7], 'removed', 'PX', DAY_MS)
      return { pack('removed') }
    end
    answers[index] = pack(call[message[1]](unpack(message, 2, ARGUMENTS_MAX + 1)))
  end
  save(sender, sequence, answers)
  local vanished = mark and tonumber(mark) > clock or false
  return { header(false, vanished), unpack(answers) }
end

clock = tonumber(ARGV[1])
if not clock then
  local time = redis.call('TIME')
  clock = time[1] * 1000 + floor(time[2] / 1000)
end
local replies = {}
for index = 2, #ARGV do
  keys = {}
  for at = 1, 7 do keys[at] = KEYS[(index - 2) * 7 + at] end
  local succeeded, reply = pcall(apply, unpack_message(ARGV[index]))
  replies[index - 1] = succeeded and reply or { false, tostring(type(reply) == 'table' and reply.err or reply) }
end
return replies
