-- One pool's counters, reservations and remembered ids: the twin of core/ledger. Calls are answered from tables; what
-- they change is written when all calls of the batch are done, so that a batch that fails has changed nothing.
--
-- KEYS of a pool, all with its hash tag:
--   1  hash: "" the state; a key's name its counters; and by first byte, which no name can have,
--      1 the samples of a dimension, 2 a reservation, 3 a sender's last batch, 4 an account
--   2  sorted set: reservations by deadline
--   3  sorted set: who has recorded on which account since the last rise
--   4 to 6  hashes: remembered ids, in three generations
--   7  until when there must be counters, or that the pool is removed

local CLOCK_STEP_MS, RESERVE_MS_MAX, ID_LIFE_MS_MAX = 3600000, 3600000, 86400000
local DEADLINES_FOLLOWED_MAX = 64
local SAMPLE_INTERVAL_MS, SAMPLES_MAX, ALPHA = 10000, 360, 0.3
local DAY_MS, HOUR_MS = 86400000, 3600000
local GENERATIONS = 3
local SAMPLES, HOLD, BATCH, ACCOUNT = '\1', '\2', '\3', '\4'
local null, pack, unpack_message = cjson.null, cmsgpack.pack, cmsgpack.unpack

-- The pool at hand: its state, what was read of it, and what has changed.
local pool = {}

-- A dimension: {unit, window, total, cumulative, rate, sampled at, cumulative then}.
local D = { UNIT = 1, WINDOW = 2, TOTAL = 3, CUMULATIVE = 4, RATE = 5, SAMPLED_AT = 6, SAMPLED = 7 }
-- A key: {counters by dimension, model counters {model, unit, window, counter}, shares}.
local K = { COUNTERS = 1, MODELS = 2, SHARES = 3 }
-- A reservation: core/ledger/calls.rs, Hold.
local R = { KEY = 1, DEADLINE = 5, AMOUNTS = 6 }
-- A generation of ids: {when it began, when the last of its ids ends, how many, when it expires}.
local G = { BEGAN = 1, ENDS = 2, COUNT = 3, EXPIRES = 4 }

local ledger = {}

function ledger.new_counter() return { 0, 0, 0, 0 } end

-- What is changed lives at least until `at`.
function ledger.live_until(at)
  if at > pool.lives_until then pool.lives_until = at end
end

-- With null for what is not there: an array has no holes.
function ledger.without_holes(array, length)
  local copy = {}
  for position = 1, length do copy[position] = array[position] == nil and null or array[position] end
  return copy
end

-- By bytes, whatever the language of the server.
function ledger.precedes(a, b)
  for index = 1, min(#a, #b) do
    local x, y = a:byte(index), b:byte(index)
    if x ~= y then return x < y end
  end
  return #a < #b
end

function ledger.is_same_counter(a, b)
  return a[1][1] == b[1][1] and a[1][2] == b[1][2] and a[2] == b[2]
end

function ledger.is_special(field) return field == '' or field:byte() <= 4 end

function ledger.cache_key(name, packed)
  local key = packed and unpack_message(packed) or { {}, {}, {} }
  pool.counters_of[name] = key
  return key
end

function ledger.cache_account(field, packed)
  local number, head = unpack(unpack_message(packed))
  local unit, window, connection = field:match('^.(%a+):(%d+):(.*)$')
  local account = { number = number, head = head, field = field, unit = unit, window = tonumber(window),
    connection = connection }
  pool.accounts[field] = account
  return account
end

-- Reads all that is kept of the pool.
function ledger.read_all()
  if pool.all_read then return end
  pool.all_read = true
  local fields = redis.call('HGETALL', pool.keys[1])
  for index = 1, #fields, 2 do
    local field, packed = fields[index], fields[index + 1]
    if not ledger.is_special(field) then
      if not pool.counters_of[field] then ledger.cache_key(field, packed) end
    elseif field:byte() == 4 and pool.accounts[field] == nil then
      ledger.cache_account(field, packed)
    end
  end
end

function ledger.key_of(name)
  local key = pool.counters_of[name]
  if key then return key end
  return ledger.cache_key(name, not pool.all_read and redis.call('HGET', pool.keys[1], name))
end

-- The names of all keys, in no order.
function ledger.all_names()
  ledger.read_all()
  local names = {}
  for name in pairs(pool.counters_of) do names[#names + 1] = name end
  return names
end

-- Reads many keys at once.
function ledger.read_keys(names)
  local missing = {}
  for index, name in ipairs(names) do
    if not pool.counters_of[name] and not pool.all_read then missing[#missing + 1] = name end
    if #missing > 0 and (#missing == 1000 or index == #names) then
      local stored = redis.call('HMGET', pool.keys[1], unpack(missing))
      for at, of in ipairs(missing) do ledger.cache_key(of, stored[at]) end
      missing = {}
    end
  end
end

function ledger.touch(name) pool.changed[name] = pool.counters_of[name] end

function ledger.position_of(dimension)
  for index, of in ipairs(pool.dimensions) do
    if of[D.UNIT] == dimension[1] and of[D.WINDOW] == dimension[2] then return index end
  end
end

function ledger.dimension_of(dimension)
  local position = ledger.position_of(dimension)
  if not position then
    position = #pool.dimensions + 1
    pool.dimensions[position] = { dimension[1], dimension[2], ledger.new_counter(), 0 }
  end
  return pool.dimensions[position], position
end

-- The key's own counter and, for a dimension, the pool's total; made where they are not yet.
function ledger.counters_for(key, counter)
  local dimension, model = counter[1], counter[2]
  if model then
    for _, of in ipairs(key[K.MODELS]) do
      if of[1] == model and of[2] == dimension[1] and of[3] == dimension[2] then return of[4] end
    end
    local own = ledger.new_counter()
    table.insert(key[K.MODELS], { model, dimension[1], dimension[2], own })
    return own
  end
  local of, position = ledger.dimension_of(dimension)
  local counters = key[K.COUNTERS]
  for index = #counters + 1, position do counters[index] = ledger.new_counter() end
  return counters[position], of[D.TOTAL]
end

-- The same for reading: nothing is made.
local NOTHING = ledger.new_counter()
function ledger.read_counters(key, counter)
  local dimension, model = counter[1], counter[2]
  if model then
    for _, of in ipairs(key[K.MODELS]) do
      if of[1] == model and of[2] == dimension[1] and of[3] == dimension[2] then return of[4], NOTHING end
    end
    return NOTHING, NOTHING
  end
  local position = ledger.position_of(dimension)
  if not position then return NOTHING, NOTHING end
  return key[K.COUNTERS][position] or NOTHING, pool.dimensions[position][D.TOTAL]
end

function ledger.sampler_add(of, steps)
  of[D.CUMULATIVE] = of[D.CUMULATIVE] + rule.room_on(of[D.CUMULATIVE], steps)
end

-- A call was recorded that counts in `dimension`.
function ledger.sample(dimension)
  local of = ledger.dimension_of(dimension)
  local at = of[D.SAMPLED_AT]
  if at and rule.ms_since(pool.now, at) < SAMPLE_INTERVAL_MS then return end
  local elapsed = at and rule.ms_since(pool.now, at) or 0
  if elapsed > 0 then
    local rate = max(0, of[D.CUMULATIVE] - of[D.SAMPLED]) / (elapsed / 1000)
    of[D.RATE] = of[D.RATE] and ALPHA * rate + (1 - ALPHA) * of[D.RATE] or rate
  end
  of[D.SAMPLED_AT], of[D.SAMPLED] = pool.now, of[D.CUMULATIVE]
  local field = SAMPLES .. of[D.UNIT] .. ':' .. of[D.WINDOW]
  local kept = pool.changed[field]
  if not kept then
    local packed = not pool.removed[field] and redis.call('HGET', pool.keys[1], field)
    kept = packed and unpack_message(packed) or {}
  end
  kept[#kept + 1] = { pool.now, of[D.CUMULATIVE] }
  if #kept > SAMPLES_MAX then table.remove(kept, 1) end
  pool.changed[field], pool.removed[field] = kept, nil
end

-- Ids.

-- An id's memory is its end, whether its reservation was late, the fingerprint and, for a request id, the name of the
-- reservation.
function ledger.memory_of(id)
  for step = 0, GENERATIONS - 1 do
    local index = (pool.generations.current - step) % GENERATIONS
    local generation = pool.generations[index + 1]
    if generation[G.ENDS] > pool.now then
      local packed = pool.ids_written[index + 1][id] or redis.call('HGET', pool.keys[4 + index], id)
      if packed then
        local ends_at, late = struct.unpack('>I6B', packed)
        if ends_at > pool.now then
          return { ends_at = ends_at, late = late == 1, fingerprint = packed:sub(8, 19), random = packed:sub(20) }
        end
      end
    end
  end
end

-- The newest generation is followed by another when its ids have used up half of their life and the oldest have ended.
function ledger.generation_at_hand()
  local newest = pool.generations[pool.generations.current + 1]
  local oldest = (pool.generations.current + 1) % GENERATIONS
  local aged = pool.now - newest[G.BEGAN] >= (newest[G.ENDS] - pool.now) / 2
  if newest[G.COUNT] > 0 and aged and pool.generations[oldest + 1][G.ENDS] <= pool.now then
    pool.generations.current = oldest
    pool.generations[oldest + 1] = { pool.now, 0, 0, 0 }
    pool.ids_written[oldest + 1] = {}
    pool.generations.emptied[oldest + 1] = true
  end
  return pool.generations.current + 1
end

function ledger.remember(id, ends_at, late, fingerprint, random)
  local index = ledger.generation_at_hand()
  local generation = pool.generations[index]
  generation[G.ENDS] = max(generation[G.ENDS], ends_at)
  generation[G.COUNT] = generation[G.COUNT] + 1
  pool.ids_written[index][id] = struct.pack('>I6B', ends_at, late and 1 or 0) .. fingerprint .. (random or '')
  ledger.live_until(ends_at)
end

-- Forgets a request that made the reservation `random`.
function ledger.forget(id, random)
  for index = 1, GENERATIONS do
    local packed = pool.ids_written[index][id] or redis.call('HGET', pool.keys[3 + index], id)
    if packed and packed:sub(20) == random then
      pool.ids_written[index][id] = struct.pack('>I6B', 0, 0) .. packed:sub(8)
    end
  end
end

-- Reservations.

function ledger.cache_hold(random, packed)
  pool.holds[random] = packed and unpack_message(packed) or false
  return pool.holds[random]
end

function ledger.hold_of(random)
  local of = pool.holds[random]
  if of == nil then of = ledger.cache_hold(random, redis.call('HGET', pool.keys[1], HOLD .. random)) end
  return of or nil
end

function ledger.change_reserved(of, sign)
  local key = ledger.key_of(of[R.KEY])
  for _, amount in ipairs(of[R.AMOUNTS]) do
    local own, total = ledger.counters_for(key, amount[1])
    own[4] = max(0, own[4] + sign * amount[2])
    if total then total[4] = max(0, total[4] + sign * amount[2]) end
  end
  ledger.touch(of[R.KEY])
end

function ledger.hold(random, of)
  ledger.change_reserved(of, 1)
  pool.holds[random], pool.changed[HOLD .. random], pool.removed[HOLD .. random] = of, of, nil
  pool.deadlines[random] = of[R.DEADLINE]
  pool.open = pool.open + 1
  ledger.live_until(of[R.DEADLINE])
end

function ledger.give_back(random, of)
  ledger.change_reserved(of, -1)
  pool.holds[random], pool.changed[HOLD .. random], pool.removed[HOLD .. random] = false, nil, true
  pool.deadlines[random] = false
  pool.open = pool.open - 1
end

function ledger.by_deadline(a, b)
  if a[1] ~= b[1] then return a[1] < b[1] end
  return ledger.precedes(a[2], b[2])
end

-- The first `count` open reservations and perhaps some more, {deadline, name}, and the last deadline.
function ledger.first_open(count)
  local listed, unwritten = {}, 0
  for random, deadline in pairs(pool.deadlines) do
    unwritten = unwritten + 1
    if deadline then listed[#listed + 1] = { deadline, random } end
  end
  local stored = redis.call('ZRANGE', pool.keys[2], 0, count + unwritten - 1, 'WITHSCORES')
  for index = 1, #stored, 2 do
    local random = stored[index]
    if pool.deadlines[random] == nil then listed[#listed + 1] = { tonumber(stored[index + 1]), random } end
  end
  table.sort(listed, ledger.by_deadline)
  local last = listed[#listed] and listed[#listed][1]
  if pool.open > #listed then
    stored = redis.call('ZREVRANGE', pool.keys[2], 0, unwritten, 'WITHSCORES')
    for index = #stored, 2, -2 do
      if pool.deadlines[stored[index - 1]] == nil then last = max(last or 0, tonumber(stored[index])) end
    end
  end
  return listed, last
end

-- What open reservations give back, for each check {by the key, by the pool}.
function ledger.releases_of(charge, counters)
  local releases = {}
  local listed, last = ledger.first_open(DEADLINES_FOLLOWED_MAX)
  for index = 1, min(#listed, DEADLINES_FOLLOWED_MAX) do
    local of = ledger.hold_of(listed[index][2])
    local held = {}
    for at, check in ipairs(charge[6]) do
      local steps = 0
      for _, amount in ipairs(of[R.AMOUNTS]) do
        if ledger.is_same_counter(amount[1], check[1]) then steps = amount[2] break end
      end
      held[at] = { of[R.KEY] == charge[2] and steps or 0, steps }
    end
    releases[index] = { listed[index][1], held }
  end
  if pool.open > DEADLINES_FOLLOWED_MAX then
    local held = {}
    for at, of in ipairs(counters) do held[at] = { of[1][4], of[2][4] } end
    releases[#releases + 1] = { last, held }
  end
  return releases
end
