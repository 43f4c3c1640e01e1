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

-- The state of the pool at hand.
local keys, clock, stepped_back, now, lag, born, dimensions, next_deadline, next_window_end, accounts_made, generations, open,
  expires_at, lives_until, compact_at
-- What was read of it, and what has changed.
local counters_of, accounts, holds, all_read, changed, removed, deadlines, recording, ids_written, ended

-- A dimension: {unit, window, total, cumulative, rate, sampled at, cumulative then}.
local D = { UNIT = 1, WINDOW = 2, TOTAL = 3, CUMULATIVE = 4, RATE = 5, SAMPLED_AT = 6, SAMPLED = 7 }
-- A key: {counters by dimension, model counters {model, unit, window, counter}, shares}.
local K = { COUNTERS = 1, MODELS = 2, SHARES = 3 }
-- A reservation: core/ledger/calls.rs, Hold.
local R = { KEY = 1, DEADLINE = 5, AMOUNTS = 6 }
-- A generation of ids: {when it began, when the last of its ids ends, how many, when it expires}.
local G = { BEGAN = 1, ENDS = 2, COUNT = 3, EXPIRES = 4 }

local function new_counter() return { 0, 0, 0, 0 } end

-- What is changed lives at least until `at`.
local function live_until(at)
  if at > lives_until then lives_until = at end
end

-- With null for what is not there: an array has no holes.
local function without_holes(array, length)
  local copy = {}
  for position = 1, length do copy[position] = array[position] == nil and null or array[position] end
  return copy
end

-- By bytes, whatever the language of the server.
local function precedes(a, b)
  for index = 1, min(#a, #b) do
    local x, y = a:byte(index), b:byte(index)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function is_same_counter(a, b)
  return a[1][1] == b[1][1] and a[1][2] == b[1][2] and a[2] == b[2]
end

local function is_special(field) return field == '' or field:byte() <= 4 end

local function cache_key(name, packed)
  local key = packed and unpack_message(packed) or { {}, {}, {} }
  counters_of[name] = key
  return key
end

local function cache_account(field, packed)
  local number, head = unpack(unpack_message(packed))
  local unit, window, connection = field:match('^.(%a+):(%d+):(.*)$')
  local account = { number = number, head = head, field = field, unit = unit, window = tonumber(window),
    connection = connection }
  accounts[field] = account
  return account
end

-- Reads all that is kept of the pool.
local function read_all()
  if all_read then return end
  all_read = true
  local fields = redis.call('HGETALL', keys[1])
  for index = 1, #fields, 2 do
    local field, packed = fields[index], fields[index + 1]
    if not is_special(field) then
      if not counters_of[field] then cache_key(field, packed) end
    elseif field:byte() == 4 and accounts[field] == nil then
      cache_account(field, packed)
    end
  end
end

local function key_of(name)
  local key = counters_of[name]
  if key then return key end
  return cache_key(name, not all_read and redis.call('HGET', keys[1], name))
end

-- The names of all keys, in the order of their bytes.
local function all_names()
  read_all()
  local names = {}
  for name in pairs(counters_of) do names[#names + 1] = name end
  table.sort(names, precedes)
  return names
end

local function touch(name) changed[name] = counters_of[name] end

local function position_of(dimension)
  for index, of in ipairs(dimensions) do
    if of[D.UNIT] == dimension[1] and of[D.WINDOW] == dimension[2] then return index end
  end
end

local function dimension_of(dimension)
  local position = position_of(dimension)
  if not position then
    position = #dimensions + 1
    dimensions[position] = { dimension[1], dimension[2], new_counter(), 0 }
  end
  return dimensions[position], position
end

-- The key's own counter and, for a dimension, the pool's total; made where they are not yet.
local function counters_for(key, counter)
  local dimension, model = counter[1], counter[2]
  if model then
    for _, of in ipairs(key[K.MODELS]) do
      if of[1] == model and of[2] == dimension[1] and of[3] == dimension[2] then return of[4] end
    end
    local own = new_counter()
    table.insert(key[K.MODELS], { model, dimension[1], dimension[2], own })
    return own
  end
  local of, position = dimension_of(dimension)
  local counters = key[K.COUNTERS]
  for index = #counters + 1, position do counters[index] = new_counter() end
  return counters[position], of[D.TOTAL]
end

-- The same for reading: nothing is made.
local NOTHING = new_counter()
local function read_counters(key, counter)
  local dimension, model = counter[1], counter[2]
  if model then
    for _, of in ipairs(key[K.MODELS]) do
      if of[1] == model and of[2] == dimension[1] and of[3] == dimension[2] then return of[4], NOTHING end
    end
    return NOTHING, NOTHING
  end
  local position = position_of(dimension)
  if not position then return NOTHING, NOTHING end
  return key[K.COUNTERS][position] or NOTHING, dimensions[position][D.TOTAL]
end

local function sampler_add(of, steps)
  of[D.CUMULATIVE] = of[D.CUMULATIVE] + room_on(of[D.CUMULATIVE], steps)
end

-- A call was recorded that counts in `dimension`.
local function sample(dimension)
  local of = dimension_of(dimension)
  local at = of[D.SAMPLED_AT]
  if at and ms_since(now, at) < SAMPLE_INTERVAL_MS then return end
  local elapsed = at and ms_since(now, at) or 0
  if elapsed > 0 then
    local rate = max(0, of[D.CUMULATIVE] - of[D.SAMPLED]) / (elapsed / 1000)
    of[D.RATE] = of[D.RATE] and ALPHA * rate + (1 - ALPHA) * of[D.RATE] or rate
  end
  of[D.SAMPLED_AT], of[D.SAMPLED] = now, of[D.CUMULATIVE]
  local field = SAMPLES .. of[D.UNIT] .. ':' .. of[D.WINDOW]
  local kept = changed[field]
  if not kept then
    local packed = not removed[field] and redis.call('HGET', keys[1], field)
    kept = packed and unpack_message(packed) or {}
  end
  kept[#kept + 1] = { now, of[D.CUMULATIVE] }
  if #kept > SAMPLES_MAX then table.remove(kept, 1) end
  changed[field], removed[field] = kept, nil
end

-- Ids.

-- An id's memory is its end, whether its reservation was late, the fingerprint and, for a request id, the name of the
-- reservation.
local function memory_of(id)
  for step = 0, GENERATIONS - 1 do
    local index = (generations.current - step) % GENERATIONS
    local generation = generations[index + 1]
    if generation[G.ENDS] > now then
      local packed = ids_written[index + 1][id] or redis.call('HGET', keys[4 + index], id)
      if packed then
        local ends_at, late = struct.unpack('>I6B', packed)
        if ends_at > now then
          return { ends_at = ends_at, late = late == 1, fingerprint = packed:sub(8, 19), random = packed:sub(20) }
        end
      end
    end
  end
end

-- The newest generation is followed by another when its ids have used up half of their life and the oldest have ended.
local function generation_at_hand()
  local newest = generations[generations.current + 1]
  local oldest = (generations.current + 1) % GENERATIONS
  local aged = now - newest[G.BEGAN] >= (newest[G.ENDS] - now) / 2
  if newest[G.COUNT] > 0 and aged and generations[oldest + 1][G.ENDS] <= now then
    generations.current = oldest
    generations[oldest + 1] = { now, 0, 0, 0 }
    ids_written[oldest + 1] = {}
    generations.emptied[oldest + 1] = true
  end
  return generations.current + 1
end

local function remember(id, ends_at, late, fingerprint, random)
  local index = generation_at_hand()
  local generation = generations[index]
  generation[G.ENDS] = max(generation[G.ENDS], ends_at)
  generation[G.COUNT] = generation[G.COUNT] + 1
  ids_written[index][id] = struct.pack('>I6B', ends_at, late and 1 or 0) .. fingerprint .. (random or '')
  live_until(ends_at)
end

-- Reservations.

local function cache_hold(random, packed)
  holds[random] = packed and unpack_message(packed) or false
  return holds[random]
end

local function hold_of(random)
  local of = holds[random]
  if of == nil then of = cache_hold(random, redis.call('HGET', keys[1], HOLD .. random)) end
  return of or nil
end

local function change_reserved(of, sign)
  local key = key_of(of[R.KEY])
  for _, amount in ipairs(of[R.AMOUNTS]) do
    local own, total = counters_for(key, amount[1])
    own[4] = max(0, own[4] + sign * amount[2])
    if total then total[4] = max(0, total[4] + sign * amount[2]) end
  end
  touch(of[R.KEY])
end

local function hold(random, of)
  change_reserved(of, 1)
  holds[random], changed[HOLD .. random], removed[HOLD .. random] = of, of, nil
  deadlines[random] = of[R.DEADLINE]
  open = open + 1
  live_until(of[R.DEADLINE])
end

local function give_back(random, of)
  change_reserved(of, -1)
  holds[random], changed[HOLD .. random], removed[HOLD .. random] = false, nil, true
  deadlines[random] = false
  open = open - 1
end

local function by_deadline(a, b)
  if a[1] ~= b[1] then return a[1] < b[1] end
  return precedes(a[2], b[2])
end

-- The first `count` open reservations and perhaps some more, {deadline, name}, and the last deadline.
local function first_open(count)
  local listed, unwritten = {}, 0
  for random, deadline in pairs(deadlines) do
    unwritten = unwritten + 1
    if deadline then listed[#listed + 1] = { deadline, random } end
  end
  local stored = redis.call('ZRANGE', keys[2], 0, count + unwritten - 1, 'WITHSCORES')
  for index = 1, #stored, 2 do
    if deadlines[stored[index]] == nil then listed[#listed + 1] = { tonumber(stored[index + 1]), stored[index] } end
  end
  table.sort(listed, by_deadline)
  local last = listed[#listed] and listed[#listed][1]
  if open > #listed then
    stored = redis.call('ZREVRANGE', keys[2], 0, unwritten, 'WITHSCORES')
    for index = #stored, 2, -2 do
      if deadlines[stored[index - 1]] == nil then last = max(last, tonumber(stored[index])) end
    end
  end
  return listed, last
end

-- What open reservations give back, for each check {by the key, by the pool}.
local function releases_of(charge, counters)
  local releases = {}
  local listed, last = first_open(DEADLINES_FOLLOWED_MAX)
  for index = 1, min(#listed, DEADLINES_FOLLOWED_MAX) do
    local of = hold_of(listed[index][2])
    local held = {}
    for at, check in ipairs(charge[6]) do
      local steps = 0
      for _, amount in ipairs(of[R.AMOUNTS]) do
        if is_same_counter(amount[1], check[1]) then steps = amount[2] break end
      end
      held[at] = { of[R.KEY] == charge[2] and steps or 0, steps }
    end
    releases[index] = { listed[index][1], held }
  end
  if open > DEADLINES_FOLLOWED_MAX then
    local held = {}
    for at, of in ipairs(counters) do held[at] = { of[1][4], of[2][4] } end
    releases[#releases + 1] = { last, held }
  end
  return releases
end

-- Accounts.

local function account_field(dimension, connection)
  return ACCOUNT .. dimension[1] .. ':' .. string.format('%.0f', dimension[2]) .. ':' .. connection
end

-- What is known of an account; nil: nothing.
local function account_of(dimension, connection)
  if accounts_made == 0 then return nil end
  local field = account_field(dimension, connection)
  local account = accounts[field]
  if account == nil then
    local packed = not all_read and redis.call('HGET', keys[1], field)
    account = packed and cache_account(field, packed) or false
    accounts[field] = account
  end
  return account or nil
end

local function make_account(dimension, connection)
  local account = account_of(dimension, connection)
  if account then return account end
  accounts_made = accounts_made + 1
  local field = account_field(dimension, connection)
  account = { number = accounts_made, head = new_head(), field = field, unit = dimension[1], window = dimension[2],
    connection = connection }
  accounts[field] = account
  return account
end

local function keep_account(account)
  changed[account.field], removed[account.field] = account, nil
  local head = account.head
  local stop = head[H.WINDOW_END]
  if stop and (next_window_end == 0 or stop < next_window_end) then next_window_end = stop end
  live_until(max(head[H.TOUCHED_AT] + 2 * account.window, head[H.FRESH_UNTIL], stop or 0))
end

local function all_accounts()
  read_all()
  local all = {}
  for _, account in pairs(accounts) do
    if account then all[#all + 1] = account end
  end
  return all
end

local function share_in(key, account)
  for index, share in ipairs(key[K.SHARES]) do
    if share[1] == account.number then return share, index end
  end
end

-- The share of a key, made where it is not yet.
local function share_of(name, account)
  local key = key_of(name)
  touch(name)
  local share = share_in(key, account)
  if not share then
    share = { account.number, 0, { 0, 0, 0 }, {} }
    table.insert(key[K.SHARES], share)
  end
  return share
end

local function recorder(account, name) return string.format('%d:', account.number) .. name end

-- The names of those who have recorded on the account and no rise has been split by.
local function recorders_of(account)
  local prefix = string.format('%d', account.number)
  local names = {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[3], '[' .. prefix .. ':', '(' .. prefix .. ';')) do
    if recording[member] == nil then names[#names + 1] = member:sub(#prefix + 2) end
  end
  for member, is_one in pairs(recording) do
    if is_one and member:sub(1, #prefix + 1) == prefix .. ':' then names[#names + 1] = member:sub(#prefix + 2) end
  end
  table.sort(names, precedes)
  return names
end

-- A share was changed that had `slices` before: nothing is kept of one that says nothing.
local function keep_share(name, account, slices)
  local key = key_of(name)
  local share, index = share_in(key, account)
  local records = #share[S.SINCE] > 0
  if records ~= (slices > 0) then recording[recorder(account, name)] = records end
  if share_is_none(share) then table.remove(key[K.SHARES], index) end
  touch(name)
end

local function each_share(account, change)
  for _, name in ipairs(all_names()) do
    local share = share_in(counters_of[name], account)
    if share then
      local slices = #share[S.SINCE]
      change(share)
      keep_share(name, account, slices)
    end
  end
end

-- The window has ended, or another one has begun. What was recorded since the last rise may be of the new window unless
-- `weights` go too.
local function start_over(account, weights)
  each_share(account, function(share)
    set_part(account, share, 0)
    share[S.SLID] = { 0, 0, 0 }
    if weights then share[S.SINCE] = {} end
  end)
  local head = account.head
  head[H.FRACTION], head[H.EXTERNAL], head[H.SLID] = 0, 0, { 0, 0, 0 }
end

local function end_window(account)
  start_over(account, true)
  local head = account.head
  head[H.WINDOW_START], head[H.WINDOW_END] = head[H.WINDOW_END], nil
  head[H.OBSERVED_AT], head[H.PREVIOUS_END] = nil, nil
  keep_account(account)
end

-- Forgets what the provider said, and every part. What was true before `from` is not believed any more.
local function forget_account(account, from)
  start_over(account, true)
  local head = new_head()
  head[H.TOUCHED_AT], head[H.ALONE], head[H.WINDOW_START] =
    account.head[H.TOUCHED_AT], account.head[H.ALONE], from
  account.head = head
  keep_account(account)
end

local function forget_part(account, name)
  local share = share_in(key_of(name), account)
  if not share then return end
  local head, slid = account.head, account.head[H.SLID]
  local previous, current = seen_from(share[S.SLID], slid[1])
  slid[2], slid[3] = max(0, slid[2] - current), max(0, slid[3] - previous)
  local part, slices = share[S.PART], #share[S.SINCE]
  set_part(account, share, 0)
  share[S.SLID], share[S.SINCE] = { 0, 0, 0 }, {}
  keep_share(name, account, slices)
  if account.unit == 'Percent' then head[H.EXTERNAL] = head[H.EXTERNAL] + part end
  keep_account(account)
end

local function find_next_window_end()
  next_window_end = 0
  for _, account in ipairs(all_accounts()) do
    local stop = account.head[H.WINDOW_END]
    if stop and (next_window_end == 0 or stop < next_window_end) then next_window_end = stop end
  end
end

local function end_windows()
  for _, account in ipairs(all_accounts()) do
    local stop = account.head[H.WINDOW_END]
    if stop and stop <= now then end_window(account) end
  end
  find_next_window_end()
end

-- Of one dimension or of all; of one key its part alone.
local function forget_accounts(name, dimension, from)
  for _, account in ipairs(all_accounts()) do
    if not dimension or (dimension[1] == account.unit and dimension[2] == account.window) then
      if name then forget_part(account, name) else forget_account(account, from) end
    end
  end
  find_next_window_end()
end

local function record_on(account, name, cost)
  local share, head, window = share_of(name, account), account.head, account.window
  local amount, slices = cost[IN_COST[account.unit]], #share[S.SINCE]
  if account.unit == 'Percent' then
    share_weigh(share, cost, now)
  elseif is_anchored(head, now) then
    set_part(account, share, share[S.PART] + room_on(head[H.PARTS], amount))
  end
  if slides_anew(head, window, now) then
    local bucket = floor(now / window)
    counter_add(share[S.SLID], bucket, counter_add(head[H.SLID], bucket, amount))
  end
  keep_share(name, account, slices)
  head[H.TOUCHED_AT] = now
  keep_account(account)
end

-- A rise is split over those who recorded since the last one; a fall lowers every part alike.
local function move_figure(account, figure, observed_at)
  local before = figure_of(account.head[H.FRACTION])
  if figure > before then
    local names, shares, slices = recorders_of(account), {}, {}
    for index, name in ipairs(names) do
      shares[index] = share_of(name, account)
      slices[index] = #shares[index][S.SINCE]
    end
    local risen = split_rise(account, shares, figure - before, observed_at)
    for index, name in ipairs(names) do keep_share(name, account, slices[index]) end
    if risen > 0 then sampler_add(dimension_of({ account.unit, account.window }), risen) end
  elseif figure < before then
    local left = figure
    each_share(account, function(share)
      local part = min(scaled(share[S.PART], figure, before), left)
      left = left - part
      set_part(account, share, part)
    end)
    account.head[H.EXTERNAL] = left
  end
end

-- What each key has used in the sliding window, in whole steps: {name, steps}.
local function sliding_estimates(dimension, account)
  local position = position_of(dimension)
  local estimates = {}
  if not position or dimension[1] == 'Percent' then return estimates end
  for _, name in ipairs(all_names()) do
    local key = counters_of[name]
    local counter = key[K.COUNTERS][position]
    if account and slides_anew(account.head, dimension[2], now) then
      local share = share_in(key, account)
      counter = share and share[S.SLID] or NOTHING
    end
    local steps = counter and round_half_even(counter_at(counter, dimension[2], now)) or 0
    if steps > 0 then estimates[#estimates + 1] = { name, steps } end
  end
  return estimates
end

-- Reads a figure of `connection`: core/account.rs, Observation. Returns why it is not taken.
local function observe(connection, observation)
  local dimension, reset = observation[1], observation[4]
  local window = dimension[2]
  local seen = { unit = dimension[1], fraction = observation[2], life = observation[5], believed = observation[6],
    age_known = observation[7], alone = observation[8] }
  if type(reset) == 'table' then
    seen.window_end = reset.WindowEnd
    seen.stop = reset.WindowEnd or reset.Refill
  end
  -- While time stands still, what is true now is not older than what was true before.
  local observed_at = min(observation[3] + lag, now)
  local account = account_of(dimension, connection)
  local head = account and account.head or new_head()
  local why = why_unread(head, seen, window, observed_at, now)
  if why then return why end
  local was_anchored = account ~= nil and is_anchored(head, now)
  local carried = {}
  if seen.alone and seen.window_end and not was_anchored then carried = sliding_estimates(dimension, account) end

  account = make_account(dimension, connection)
  head = account.head
  if is_stale(head, window, now) then
    start_over(account, false)
  elseif is_followed_by(head, seen, window) then
    start_over(account, false)
    head[H.PREVIOUS_END], head[H.WINDOW_START] = head[H.WINDOW_END], observed_at
  end
  if seen.unit == 'Percent' then move_figure(account, figure_of(seen.fraction), observed_at) end
  head[H.FRACTION], head[H.OBSERVED_AT] = seen.fraction, observed_at
  head[H.FRESH_UNTIL], head[H.HAS_END] = seen.stop or observed_at + seen.life, seen.stop ~= nil
  head[H.ALONE], head[H.TOUCHED_AT] = seen.alone, now
  head[H.WINDOW_END] = seen.window_end or head[H.WINDOW_END]
  if seen.unit ~= 'Percent' and not was_anchored and is_anchored(head, now) then
    for _, of in ipairs(carried) do
      local share = share_of(of[1], account)
      set_part(account, share, of[2])
      keep_share(of[1], account, #share[S.SINCE])
    end
  end
  keep_account(account)
end

local function account_readings(dimension, connections, serving, key)
  local readings = {}
  if accounts_made == 0 then return readings end
  for _, connection in ipairs(connections) do
    local account = account_of(dimension, connection)
    if account then
      local head, window = account.head, account.window
      local share = share_in(key, account)
      local alone = head[H.ALONE] and #connections == 1
      local slid = nil
      if alone and slides_anew(head, window, now) then
        slid = { share and share[S.SLID] or { 0, 0, 0 }, head[H.SLID] }
      end
      local fresh = head_is_fresh(head, now)
      if fresh or head[H.WINDOW_END] or slid then
        readings[#readings + 1] = { serving == connection, head[H.FRACTION], figure_of(head[H.FRACTION]),
          fresh and head[H.FRESH_UNTIL] or nil, head[H.HAS_END], head[H.WINDOW_END], alone, slid,
          share and share[S.PART] or 0, head[H.PARTS] }
      end
    end
  end
  return readings
end
