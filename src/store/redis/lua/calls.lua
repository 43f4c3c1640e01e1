-- What a pool is asked. Calls come as store/redis/wire.rs writes them: {name, arguments}; an answer is {Ok = value} or
-- {Err = why}.

local function advance()
  if next_deadline > 0 and next_deadline <= now then
    for _, random in ipairs(redis.call('ZRANGEBYSCORE', keys[2], '-inf', string.format('%.0f', now))) do
      give_back(random, hold_of(random))
      ended.expired = ended.expired + 1
    end
  end
  if next_window_end > 0 and next_window_end <= now then end_windows() end
end

local function each_counter(name, change)
  local key = counters_of[name]
  for position, counter in ipairs(key[K.COUNTERS]) do
    change(counter, dimensions[position][D.WINDOW], dimensions[position][D.TOTAL])
  end
  for _, of in ipairs(key[K.MODELS]) do change(of[4], of[3]) end
end

-- Ends every memory by `latest`; what had ended by `before` does not come back.
local function cut_ids(before, latest_record, latest_request)
  for index, generation in ipairs(generations) do
    local stored = redis.call('HGETALL', keys[3 + index])
    for at = 1, #stored, 2 do
      local id, packed = stored[at], stored[at + 1]
      local ends_at, late = struct.unpack('>I6B', packed)
      local latest = #packed > 19 and latest_request or latest_record
      -- One that has ended is written as such.
      local stop = ends_at > before and min(ends_at, latest) or 0
      if stop ~= ends_at then ids_written[index][id] = struct.pack('>I6B', stop, late) .. packed:sub(8) end
    end
    generation[G.BEGAN] = min(generation[G.BEGAN], now)
    generation[G.ENDS] = min(generation[G.ENDS], max(latest_record, latest_request))
  end
end

-- What was filed ahead of the clock and was still in view counts in its bucket; nothing lives longer from there than it
-- could have.
local function step_back()
  local before = now
  now = clock
  local names = all_names()
  for _, of in ipairs(dimensions) do
    local reserved = of[D.TOTAL][4]
    of[D.TOTAL] = { floor(now / of[D.WINDOW]), 0, 0, reserved }
  end
  for _, name in ipairs(names) do
    each_counter(name, function(counter, window, total)
      local bucket = floor(now / window)
      counter_move(counter, floor(before / window))
      counter_rebase(counter, bucket)
      if total then
        local previous, current = seen_from(counter, bucket)
        total[2] = total[2] + room_on(total[2], current)
        total[3] = total[3] + room_on(total[3], previous)
      end
    end)
    touch(name)
  end
  local latest = now + RESERVE_MS_MAX
  for _, random in ipairs(redis.call('ZRANGEBYSCORE', keys[2], string.format('(%.0f', latest), '+inf')) do
    local of = hold_of(random)
    give_back(random, of)
    of[R.DEADLINE] = latest
    hold(random, of)
  end
  forget_accounts(nil, nil, 0)
  cut_ids(before, latest + ID_LIFE_MS_MAX, latest)
end

-- Drops keys and dimensions whose counters have aged out, accounts of which nothing is left to know, and what ended
-- senders have left.
local function compact()
  for _, account in ipairs(all_accounts()) do
    each_share(account, function(share) share_forget(share, max(0, now - account.window)) end)
    if head_is_idle(account.head, account.window, now) then
      forget_account(account, 0)
      changed[account.field], removed[account.field], accounts[account.field] = nil, true, false
    end
  end
  find_next_window_end()
  local function is_idle(counter, window)
    return counter[4] == 0 and counter_is_spent(counter, floor(now / window))
  end
  local kept, place = {}, {}
  for position, of in ipairs(dimensions) do
    local is_live = of[D.SAMPLED_AT] and ms_since(now, of[D.SAMPLED_AT]) < SAMPLES_MAX * SAMPLE_INTERVAL_MS
    if is_live or not is_idle(of[D.TOTAL], of[D.WINDOW]) then
      kept[#kept + 1] = of
      place[position] = #kept
    else
      removed[SAMPLES .. of[D.UNIT] .. ':' .. string.format('%.0f', of[D.WINDOW])] = true
    end
  end
  for _, name in ipairs(all_names()) do
    local key, counters, models, is_used = counters_of[name], {}, {}, false
    for position, counter in ipairs(key[K.COUNTERS]) do
      is_used = is_used or not is_idle(counter, dimensions[position][D.WINDOW])
      if place[position] then counters[place[position]] = counter end
    end
    for _, of in ipairs(key[K.MODELS]) do
      if not is_idle(of[4], of[3]) then models[#models + 1] = of end
    end
    if not is_used then counters = {} end
    counters_of[name] = { counters, models, key[K.SHARES] }
    touch(name)
  end
  dimensions = kept
  local fields = redis.call('HGETALL', keys[1])
  for index = 1, #fields, 2 do
    local field = fields[index]
    if field:sub(1, 1) == BATCH and ms_since(now, unpack_message(fields[index + 1])[2]) > DAY_MS then
      removed[field] = true
    end
  end
  compact_at = now + HOUR_MS
end

-- What the counters of a charge (core/charge.rs) hold, and whether any of its checks does not pass.
local function read(charge)
  local name, connections, serving, terms, checks = charge[2], charge[3], charge[4], charge[5], charge[6]
  local key = key_of(name)
  local counters, blocked = {}, false
  for at, check in ipairs(checks) do
    local own, total = read_counters(key, check[1])
    local readings = check[1][2] and {} or account_readings(check[1][1], connections, serving, key)
    blocked = is_blocked(terms, check, own, total, readings, now) or blocked
    counters[at] = { own, total, readings }
  end
  local releases = blocked and open > 0 and releases_of(charge, counters) or {}
  return counters, releases, blocked
end

local function copy_of(counter) return { counter[1], counter[2], counter[3], counter[4] } end

-- Copied: what the call does changes the counters.
local function reading_of(counters, releases)
  local copies = {}
  for at, of in ipairs(counters) do
    local readings = {}
    for index, account in ipairs(of[3]) do readings[index] = without_holes(account, A.PARTS) end
    copies[at] = { copy_of(of[1]), copy_of(of[2]), readings }
  end
  return { now, copies, releases }
end

local call = {}

function call.check(charge)
  local counters, releases = read(charge)
  return { Ok = reading_of(counters, releases) }
end

function call.enforce(charge, random, connection, model, life, request, request_id, fingerprint, not_after)
  if not_after and clock > not_after then return { Err = 'Late' } end
  local counters, releases, blocked = read(charge)
  local memory = request and memory_of(request)
  if memory then
    if memory.fingerprint ~= fingerprint then return { Err = 'RequestId' } end
    return { Ok = { reading_of(counters, releases), { memory.random, memory.ends_at, true } } }
  end
  if blocked and not charge[7] then return { Ok = { reading_of(counters, releases), null } } end
  local reading = reading_of(counters, releases)
  local deadline = now + life
  if request then remember(request, deadline, false, fingerprint, random) end
  local amounts = {}
  for at, check in ipairs(charge[6]) do
    local steps = room_on(max(counters[at][1][4], counters[at][2][4]), check[2])
    if steps > 0 then amounts[#amounts + 1] = { check[1], steps } end
  end
  hold(random, { charge[2], connection, model, request_id, deadline, amounts })
  return { Ok = { reading, { random, deadline, false } } }
end

-- Why a record is refused: it says something else than what is known.
local function disagrees(record, held, settled, counted)
  local fingerprint = record.fingerprint
  if held and held[R.KEY] ~= record.name then return 'ForeignKey' end
  if settled and settled.fingerprint:sub(1, 4) ~= fingerprint:sub(1, 4) then return 'ForeignKey' end
  if settled and settled.fingerprint ~= fingerprint then return 'Settled' end
  if counted and counted.fingerprint ~= fingerprint then return 'IdempotencyKey' end
end

local function count(record)
  local key = key_of(record.name)
  for _, of in ipairs(record.counts) do
    local counter, amount = of[1], of[2]
    if amount > 0 then
      local window = counter[1][2]
      local bucket = floor(now / window)
      local own, total = counters_for(key, counter)
      if total then amount = counter_add(total, bucket, amount) end
      local added = counter_add(own, bucket, amount)
      if total then sampler_add(dimension_of(counter[1]), added) end
      live_until(now + 2 * window)
    end
  end
  touch(record.name)
end

local function record_on_accounts(record)
  if not record.connection then return end
  for _, of in ipairs(record.counts) do
    local counter = of[1]
    if not counter[2] then
      local account = account_of(counter[1], record.connection)
      if not account and counter[1][1] == 'Percent' then account = make_account(counter[1], record.connection) end
      if account then record_on(account, record.name, record.cost) end
    end
  end
end

function call.record(name, connection, cost, observations, counts, settles, random, held_elsewhere, idempotency, fingerprint,
  life)
  local record = { name = name, connection = connection, cost = cost, counts = counts, fingerprint = fingerprint }
  local settled = settles and memory_of(settles)
  local counted = idempotency and memory_of(idempotency)
  local held = random and hold_of(random)
  local why = disagrees(record, held, settled, counted)
  if why then return { Err = why } end

  local duplicate = (settled or counted) and true or false
  local late = false
  if settles then
    if settled then late = settled.late else late = not held and not held_elsewhere end
  end
  if held then
    give_back(random, held)
    ended.settled = ended.settled + 1
  end
  if not duplicate then
    count(record)
    record_on_accounts(record)
  end
  local unread = 0
  if connection then
    for _, observation in ipairs(observations) do
      if observe(connection, observation) then unread = unread + 1 end
    end
  end
  if not duplicate then
    for _, of in ipairs(counts) do
      if not of[1][2] then sample(of[1][1]) end
    end
  end
  if settles and not settled then
    local from = held and max(held[R.DEADLINE], now) or now
    remember(settles, from + life, late, fingerprint)
  end
  if idempotency and not counted then remember(idempotency, now + life, late, fingerprint) end
  return { Ok = { duplicate, late, unread } }
end

function call.release(random, name)
  local held = hold_of(random)
  if not held then return { Ok = false } end
  if name and name ~= held[R.KEY] then return { Err = 'ForeignKey' } end
  give_back(random, held)
  ended.released = ended.released + 1
  return { Ok = true }
end

-- What is known of a reservation that a record, which counts in another pool, settles.
function call.reservation(name, fingerprint, id, random)
  local record = { name = name, fingerprint = fingerprint }
  local settled = memory_of(id)
  local held = random and hold_of(random)
  local why = disagrees(record, held, settled)
  if why then return { Err = why } end
  return { Ok = settled and 'Settled' or held and 'Open' or 'Unknown' }
end

function call.report(connection, observations)
  local taken = {}
  for index, observation in ipairs(observations) do
    local why = observe(connection, observation)
    taken[index] = why and { Err = why } or { Ok = null }
  end
  return { Ok = taken }
end

-- Sets what is recorded to zero: of one key or of all, in one dimension or, model caps included, in all.
function call.reset(only, dimension)
  for _, name in ipairs(all_names()) do
    if not only or only == name then
      local key = counters_of[name]
      for position, counter in ipairs(key[K.COUNTERS]) do
        local of_dimension = dimensions[position]
        if not dimension or (of_dimension[D.UNIT] == dimension[1] and of_dimension[D.WINDOW] == dimension[2]) then
          counter_take(of_dimension[D.TOTAL], counter[1], counter[2])
          counter_take(of_dimension[D.TOTAL], counter[1] - 1, counter[3])
          counter[2], counter[3] = 0, 0
        end
      end
      for _, model in ipairs(dimension and {} or key[K.MODELS]) do model[4][2], model[4][3] = 0, 0 end
      touch(name)
    end
  end
  forget_accounts(only, dimension, now)
  return { Ok = null }
end
